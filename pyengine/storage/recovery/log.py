"""The log in a recovery: what is found of it, where it ends, and what is cut, cleared and put into quarantine.

    find_log         the segments, refused as RocketMQ would refuse them, and where the reading begins
    plan_log         where the log ends, by scan, commit slot and pool, and what happens to the bytes beyond; it reads only
    LogPlan.change   remove the last segments if they are zeros; quarantine; remove the other segments after the end, newest first;
                     drain the pool; clear the tail; rewrite bytes that may not be on the disk, sync, and read them again

Recovery does not delete a message that a producer or a reader may know: it goes to quarantine/ before the log
changes. Only bytes that provably none of them knows are cleared without a copy.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from pyengine.engine_config import EngineConfig
from pyengine.errors import DiskError, DiskFullError
from pyengine.formats.constants import MESSAGE_BYTES_MIN
from pyengine.formats.record import BEGIN, I64, PHYSICAL_OFFSET_AT, CaseLabel
from pyengine.formats.small_file import opened
from pyengine.native.failpoints import failpoint
from pyengine.native.flush import sync_file_system
from pyengine.native.scan import walk
from pyengine.storage.checkpoint import CUT, DurableWatermark, Notes, RecoveryPath, SharedState
from pyengine.storage.commit_log import (
    Log,
    LogScan,
    RecoveryStart,
    find_recovery_start,
    first_after_orderly_stop,
    new_segment_folder,
    own_watermark,
    scan_log,
)
from pyengine.storage.durable_writes import create_file, free_end, rewrite, sync_file, sync_folder, write_at
from pyengine.storage.file_system import free_bytes
from pyengine.storage.mapped_file import MappedFile, clear_file_from, mapped, renew_zeros, used_end
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.quarantine import PlannedPiece, copy_of_bytes, copy_of_memory, move_of
from pyengine.storage.recovery.report import MISSING_SEGMENT, Progress

# -- what is found -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FoundLog:
    """The notes and the log's files of a stopped store, as they are before its recovery."""

    store: MessageStore
    notes: Notes
    options: EngineConfig
    accept_loss: bool
    log: Log                            # up to a cut
    beyond: tuple[MappedFile, ...]      # the segments after a cut
    watermark: DurableWatermark | None  # for a copy that has an identity of its own by now, one that covers no bytes yet
    copied: DurableWatermark | None     # the original's watermark in a copied store
    start: RecoveryStart

    @property
    def is_abnormal(self) -> bool:
        return self.start.path is RecoveryPath.ABNORMAL

    @property
    def may_have_failed_sync(self) -> bool:
        """Whether a sync failed, perhaps unnoticed as its engine died; never in a copy, which no engine has synced."""
        return self.notes.has_failed_sync or (self.log.is_ours and self.is_abnormal and self.copied is None)


def find_log(store: MessageStore, notes: Notes, options: EngineConfig, *, accept_loss: bool) -> FoundLog:
    """List the segments. StoreRefusedError for files that RocketMQ would refuse, CorruptionError for a missing segment, unless that is
    accepted."""
    reading, copied, cut = notes.reading, None, notes.cut
    watermark, identity = reading.watermark, reading.identity
    segments = store.list_complete_log(accept_loss=accept_loss)
    kept = [segment for segment in segments if cut is None or segment.start_offset < cut.at]
    own = own_watermark(reading, kept[0].start_offset if kept else 0)
    if own is not None and reading.is_copied and identity is not None:
        copied, watermark = watermark, replace(own, uuid=str(identity.uuid))
    log = Log.of(kept, store.segment_bytes, watermark)
    start = find_recovery_start(notes.left, log, has_failed_sync=notes.has_failed_sync)
    return FoundLog(store, notes, options, accept_loss, log, tuple(segments[len(kept):]), watermark, copied, start)


# -- what is planned -----------------------------------------------------------------


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

    found: FoundLog
    scan: LogScan
    by_slot: bool  # the end is the commit slot's; otherwise that of the scan
    shared_state: str
    tail: Tail = Tail.NOTHING
    tail_bytes: int = 0  # up to the last non-zero one
    cut_bytes: int = 0
    drains: tuple[tuple[int, memoryview], ...] = ()
    stranded_pool: tuple[tuple[int, memoryview], ...] = ()
    extra: tuple[tuple[MappedFile, Extra], ...] = ()
    pieces: tuple[PlannedPiece, ...] = ()  # that go to quarantine, in this order; once all else is decided

    @property
    def log(self) -> Log:
        return self.found.log

    @property
    def end_offset(self) -> int:
        return self.scan.end_offset

    @property
    def holder(self) -> MappedFile | None:
        """The segment that the log ends in."""
        index = self.log.index_of(self.end_offset)
        return None if index is None else self.log.segments[index]

    @property
    def changes_something(self) -> bool:
        return bool(self.drains or self.stranded_pool or self.extra or self.tail is not Tail.NOTHING)

    @property
    def was_emptied(self) -> bool:
        """Whether only zeros are after the end of a log that was stopped in order, or what RocketMQ writes there."""
        return not self.found.is_abnormal and self.tail in (Tail.NOTHING, Tail.ROLL) and all(kind is Extra.SPARE for _, kind in self.extra)

    @property
    def is_degraded(self) -> bool:
        """Whether bytes are damaged that had been synced, and the loss is not accepted: nothing is changed.

        In a copy, a segment that was copied while it was written ends with zeros or inside a record, perhaps inside
        its head, where the bytes do not show that they are one. If records follow in that segment, they were copied later, or the
        damage is of a later time.
        """
        if self.found.accept_loss:
            return False
        if self.found.copied is None:
            return self.log.watermark is not None and self.end_offset < self.log.watermark
        holds_no_record = not self.tail.may_be_message or self.tail_bytes < MESSAGE_BYTES_MIN
        is_cut_short = holds_no_record and self.scan.reason != MISSING_SEGMENT
        return self.end_offset < self.found.copied.flushed and not is_cut_short

    @property
    def unsure_from(self) -> int:
        """Bytes of the log from here on may not be on the disk; its end if all are, or will be after one sync."""
        durable_end = self.found.notes.durable_end
        if self.found.copied is not None and self.found.watermark is not None:
            durable_end = self.found.watermark.flushed
        return max(durable_end, self.scan.scan_from) if self.found.may_have_failed_sync else self.end_offset

    @property
    def last_stored_ms(self) -> int:
        """The store time of the last message; -1 if there is none."""
        last_ms, index = self.scan.last_store_timestamp_ms, self.log.index_of(self.scan.scan_from) or 0
        while last_ms < 0 and index > 0:  # the walk has read only blanks
            index -= 1
            last_ms = scan_log(self.log, index, limit=self.scan.scan_from).last_store_timestamp_ms
        return last_ms

    @property
    def next_read_from(self) -> int:
        """Where the next recovery, after an orderly stop, begins to read the log."""
        kept = [segment for segment in self.log.segments if segment.start_offset <= self.end_offset]
        return kept[first_after_orderly_stop(self.log, len(kept))].start_offset if kept else self.scan.scan_from

    def with_pieces(self) -> LogPlan:
        """Name what goes to quarantine."""
        store, end, cut, holder = self.found.store, self.end_offset, self.found.notes.cut, self.holder
        pieces = [copy_of_memory(store, start, content, f"pool bytes after the end of the log at {end}")
                  for start, content in self.stranded_pool]
        if self.tail.may_be_message and holder is not None and not (cut and cut.kept):  # half cleared it is never copied again
            pieces += copy_of_bytes(store, holder, end, holder.start_offset + self.log.size_bytes,
                                    cut.reason if cut else f"after the end of the log at {end} ({self.scan.reason})")
        pieces += [move_of(store, segment.path, segment.start_offset, cut.reason if cut else f"{Extra.STRANDED}: the log ends at {end}")
                   for segment, kind in reversed(self.extra) if kind is Extra.STRANDED]
        return replace(self, pieces=tuple(pieces))

    # -- the change

    def make_room(self) -> None:
        """On a disk without space for a segment free the blocks of the zeros after the end: the other steps need that space.

        Segments of zeros keep their names until the marker is written: RocketMQ's store is read from its third-last one on.
        """
        last, zeros = self.holder, [(segment.path, 0) for segment, kind in self.extra if kind is Extra.SPARE]
        if last is not None and not self.found.notes.has_failed_sync:  # after a failed sync zeros may be in memory only
            zeros.append((last.path, self.end_offset - last.start_offset + self.tail_bytes))
        for path, start in zeros:
            if free_bytes(path.parent) < self.log.size_bytes:
                free_end(path, start)

    def change(self) -> None:
        """Quarantine, truncate, drain, clear and sync, in an order in which a crash loses no message."""
        holder = self.holder
        self._remove()
        for start, content in self.drains:
            base = start - start % self.log.size_bytes
            write_at(self._segment_path(base), content, start - base)
            failpoint("recovery_drained")
        if self.tail is not Tail.NOTHING and holder is not None:
            clear_file_from(holder.path, self.end_offset - holder.start_offset)
        failpoint("recovery_tail_cleared")
        self.sync()
        failpoint("recovery_log_done")

    def _remove(self) -> None:
        """Quarantine what leaves the log, and remove the segments after its end, newest first."""
        found, cut, moved = self.found, self.found.notes.cut, {piece.source: piece for piece in self.pieces if piece.digest is None}
        self.remove_last_spares()  # the copies need room
        for piece in self.pieces:
            if piece.digest is not None:
                piece.keep()
        if cut and not cut.kept:
            CUT.write(found.store, replace(cut, kept=True))
            failpoint("cut_kept")
        for segment, kind in reversed(self.extra):
            self.log.forget(segment.path)
            if kind is Extra.STRANDED:
                if found.may_have_failed_sync:  # a sync alone would skip pages that the last one could not write
                    start = max(0, self.unsure_from - segment.start_offset)
                    rewrite(segment.path, start, used_end(segment.path, start))
                moved[segment.path].keep()
            else:
                _remove_segment(segment.path)
            failpoint("recovery_segment_gone")

    def remove_last_spares(self) -> None:
        """Remove the segments of zeros after the last other one, newest first. May be repeated."""
        for segment, _ in takewhile(lambda one: one[1] is Extra.SPARE, reversed(self.extra)):
            self.log.forget(segment.path)
            _remove_segment(segment.path)

    def _segment_path(self, base: int) -> Path:
        path = self.found.store.commit_log_segment(base)
        if not path.exists():
            path = new_segment_folder(self.found.store, base, self.log.size_bytes) / path.name
            os.close(create_file(path.parent, path.name, self.log.size_bytes, allocate="none"))
        return path

    def sync(self) -> None:
        """Make the log durable from where the reading began to its end.

        Bytes that a dead engine had not synced are rewritten in place first: its last sync may have failed
        unnoticed, and a reader's mapping keeps pages in memory that never reached the disk. The zeros after the end get new
        pages even if all before them is durable. After a failed sync these zeros and the names are written again as well.
        """
        found, log, end, size_bytes, sure = self.found, self.log, self.end_offset, self.log.size_bytes, self.unsure_from
        if sure < end:
            log.forget()  # so that it is read again from the disk
        has_failed_sync = found.notes.has_failed_sync
        if (holder := self.holder) is not None and found.may_have_failed_sync:
            if has_failed_sync:
                clear_file_from(holder.path, end - holder.start_offset, zeros_too=True)
            try:
                renew_zeros(holder.path, end - holder.start_offset)
            except DiskFullError:
                free_end(holder.path, end - holder.start_offset)
        if has_failed_sync:
            for folder in {*(segment.path.parent for segment in log.segments), found.store.config}:
                sync_folder(folder)
        for path, base in found.store.list_log():  # with those that the drain has made
            if base >= end or base + size_bytes <= self.scan.scan_from:
                if has_failed_sync:
                    _drop_cached_pages(path)
                continue
            if base + size_bytes > sure and sure < end:
                rewrite(path, max(sure - base, 0), min(end - base, size_bytes))
            else:
                sync_file(path)
        if sure < end:
            self._verify_rewritten()
        if found.copied is not None:
            sync_file_system(found.store.root)  # with config/; the syncs of log, queues and index tell of an error
        if found.copied is not None or not log.is_ours:
            self._sync_names()

    def _verify_rewritten(self) -> None:
        """Raise DiskError unless the rewritten bytes are still the log that was found."""
        end, store = self.end_offset, self.found.store
        written = replace(self.log, segments=store.list_log())
        check_crc, first = self.found.options.check_crc_on_recover, written.index_of(self.unsure_from) or 0
        scan = scan_log(written, first, check_crc=check_crc, limit=end)
        if scan.end_offset != end:
            raise DiskError(f"the log in {store.commit_log} was whole up to {end} and is not beyond {scan.end_offset} ({scan.reason}), "
                            "now that it was read from the disk: recover again", path=str(store.commit_log))

    def _sync_names(self) -> None:
        """Sync the names of files of another program: RocketMQ and `cp` do not sync folders, and the watermark will cover these files."""
        store = self.found.store
        folders = {store.root, *(segment.path.parent for segment in self.log.segments)}
        for top in (store.consume_queue, store.consume_queue_ext, store.index):
            folders.update(Path(folder) for folder, _, _ in os.walk(top))
        for folder in folders:
            sync_folder(folder)


def _drop_cached_pages(path: Path) -> None:
    """Let the next reader of a segment that is not written again see what the disk has: an engine that adopts it vouches for that."""
    with contextlib.suppress(OSError), opened(os.open(path, os.O_RDONLY)) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _remove_segment(path: Path) -> None:
    """Remove the segment durably, if it still exists."""
    if path.exists():
        path.unlink()
        sync_folder(path.parent)


def plan_log(found: FoundLog, first: int, progress: Progress | None = None) -> LogPlan:
    """Find the log's end, reading from segment `first` on, and decide what happens to the bytes beyond it."""
    plan, note, log, cut, check_crc = None, "none", found.log, found.notes.cut, found.options.check_crc_on_recover
    shared = found.notes.shared if cut is None else None
    if shared is not None:
        plan, note = _plan_with_shared_state(found, first, shared, progress)
    if plan is None:
        scan = scan_log(log, first, check_crc=check_crc, limit=None if cut is None else cut.at, progress=progress)
        plan = LogPlan(found, scan, False, note)
        if shared is not None and not shared.mismatch:  # no file may have these bytes
            plan = replace(plan, stranded_pool=tuple(
                (start, buffer[start - base : end - base]) for base, buffer, start, end in _published(shared, scan.end_offset)))
    end, by_slot = plan.end_offset, plan.by_slot
    if plan.holder is not None:
        tail, used_bytes = judge_tail(plan.holder, end, plan.scan.reason, is_ours=log.is_ours, by_slot=by_slot)
        plan = replace(plan, tail=tail, tail_bytes=used_bytes)
    extra, cut_bytes = [], plan.tail_bytes
    for segment in (*log.segments, *found.beyond):
        if segment.start_offset > end or segment in found.beyond:  # one that begins at the end itself remains, as in RocketMQ's truncation
            used_bytes = used_end(segment.path)
            extra.append((segment, Extra.SPARE if not used_bytes else Extra.UNPUBLISHED if by_slot else Extra.STRANDED))
            cut_bytes += used_bytes
    return replace(plan, extra=tuple(extra), cut_bytes=cut_bytes)


def _plan_with_shared_state(found: FoundLog, first: int, shared: SharedState, progress: Progress | None) -> tuple[LogPlan | None, str]:
    """Return a plan by the commit slot; or None and the reason why the slot is not used.

    The files must reach the position that shared memory has for them: the slot's, in
    pool mode `committed`. They end earlier after a power cut, or if they were replaced.
    """
    if shared.mismatch:
        return None, f"discarded: {shared.mismatch}"
    needed = shared.committed if shared.pool_buffers else shared.slot_end
    scan = scan_log(found.log, first, check_crc=found.options.check_crc_on_recover, limit=needed, progress=progress)
    if scan.end_offset != needed:
        return None, f"discarded: the files end at {scan.end_offset}, before its position {needed}"
    plan = LogPlan(found, scan, True, "used")
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


def judge_tail(segment: MappedFile, end_offset: int, reason: str, *, is_ours: bool, by_slot: bool = False) -> tuple[Tail, int]:
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
    return (Tail.TORN if is_unfinished or is_ours else Tail.SPOILED), used_bytes
