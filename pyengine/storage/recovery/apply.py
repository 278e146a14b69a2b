"""Carry out the plan of a recovery: everything that recovery changes in a store is changed here, in this order.

    room      on a full disk, free the blocks of zeros after the end; if the marker still has no room, remove segments of zeros
    marker    of a rebuild write config/rebuild; write config/recovery; lower the watermark for an accepted loss or a cut; move the
              pieces that a rebuild replaces
    log       remove the last segments if they are zeros; quarantine; remove the other segments after the end, newest first;
              drain the pool; clear the tail; rewrite bytes that may not be on the disk, sync, and read them again
    queues    truncate queues to the log; delete index files that are damaged or were not synced
    dispatch  log -> queues and index, from where they end; sync
    finish    checkpoint, watermark, config/recovered; remove the notes of a failed sync and a cut, abort, config/rebuild, marker
    offsets   lower those of consumer groups and delay levels that are beyond the end of a queue now

A queue whose entries were shifted, by another program or a bad copy, has no hole: it ends before the queue offset of its
last message. Its next message must not get a queue offset that an older message has, or a rebuild could not tell the two apart.

The new files of a rebuild get the times of those that they replace: a search by time takes the first file of the queue
that was modified at or after that time (MappedFileQueue.getMappedFileByTime).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from pyengine.errors import DiskError, DiskFullError, FormatError, StoreRefusedError, command
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import is_filler, is_live
from pyengine.formats.record import I64, QUEUE_OFFSET_AT, decode_record
from pyengine.formats.small_file import Checkpoint
from pyengine.native.failpoints import failpoint
from pyengine.native.flush import sync_file_system
from pyengine.storage.checkpoint import (
    CUT,
    REBUILD,
    RECOVERY,
    SYNC_FAILURE,
    RebuildMarker,
    RecoveryMarker,
    intend_cut,
    read_checkpoint,
    remove_abort_file,
    write_checkpoint,
    write_marker,
    write_recovered_from,
    write_watermark,
)
from pyengine.storage.commit_log import LogDamage, Owner, new_segment_folder, next_record, scan_log
from pyengine.storage.consume_queue import message_stored_ms
from pyengine.storage.consumer_offset import ConsumerOffsets, DelayCancels, DelayOffsets
from pyengine.storage.dispatcher import GAP, Dispatcher, QueueGap
from pyengine.storage.durable_writes import (
    MANY_FILES,
    create_file,
    free_end,
    rewrite,
    sweep_unfinished,
    sync_file,
    sync_folder,
    write_at,
)
from pyengine.storage.file_system import free_bytes
from pyengine.storage.mapped_file import MappedFileQueue, MappingCache, clear_file_from, list_segments, renew_zeros, used_end
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.look import QueueState, list_index, list_queues, read_entry
from pyengine.storage.recovery.plan import Extra, QueueCut, RecoveryPlan, Tail, record_start
from pyengine.storage.recovery.quarantine import Quarantine, move_to_quarantine
from pyengine.storage.recovery.report import GrowingProgress, RecoveryReport

DISPATCH_SLICE_BYTES = 16 << 20
_NS_PER_MS = 1_000_000


class Repair:
    """Carries one plan out. A crash may interrupt each step; the next recovery repeats it."""

    def __init__(self, plan: RecoveryPlan, progress: GrowingProgress) -> None:
        self._plan, self._progress, self._store = plan, progress, plan.found.store
        self._log, self._end = plan.files, plan.log.end_offset
        self._quarantine, self._notes = Quarantine(self._store), list[str]()

    def run(self) -> RecoveryReport:
        """Change the store as planned, then lower the offsets that are beyond the end of a queue now."""
        report, queues, dispatched_from = self._plan.report(), self._plan.found.queues, self._end
        if report.changed:
            dispatched_from, queues = self._change_store()
        else:
            self._sync_log()
            sweep_unfinished(self._store)
        self._progress.finish()
        next_offsets = self._next_offsets(queues)
        ends = {(one.topic, one.queue_id): one.max_offset for one in queues}
        self._notes.extend(ConsumerOffsets(self._store).lower(ends))
        self._notes.extend(DelayOffsets(self._store).lower(ends))
        self._notes.extend(DelayCancels(self._store).lower(ends))
        failpoint("recovery_done")
        pieces = tuple(self._quarantine.pieces)
        return replace(report, queue_ends={**ends, **next_offsets}, notes=(*report.notes, *self._notes), quarantined=pieces,
                       stranded_bytes=sum(piece.size_bytes for piece in pieces), dispatched_bytes=max(0, self._end - dispatched_from))

    def _change_store(self) -> tuple[int, list[QueueState]]:
        """Return where dispatch began, and the queues afterwards."""
        plan, store, watermark, rebuilding = self._plan, self._store, self._plan.watermark, self._plan.found.notes.rebuilding
        failpoint("recovery_planned")
        sweep_unfinished(store)
        self._make_room()
        try:
            self._begin()
        except DiskFullError:  # the user's quota is full, or the file system cannot punch holes
            remove_last_spares(plan)
            self._begin()
        failpoint("recovery_marked")
        if watermark is not None and (self._end < watermark.flushed or plan.found.notes.cut is not None):
            write_watermark(store, watermark.moved_to(min(watermark.flushed, self._end)))
            failpoint("recovery_loss_accepted")
        if rebuilding is not None:
            move_to_quarantine(store, rebuilding)
        self._change_log()
        dispatched_from, queues = self._change_queues()
        self._finish()
        return dispatched_from, queues

    def _begin(self) -> None:
        if (rebuilding := self._plan.found.notes.rebuilding) is not None:
            REBUILD.write(self._store, rebuilding)
        self._mark(self._plan.dispatch_from)

    def _mark(self, dispatch_from: int) -> None:
        write_marker(self._store, RecoveryMarker(self._plan.start.path, self._plan.log.scan.scan_from, dispatch_from))

    # -- the log

    def _make_room(self) -> None:
        """On a disk without space for a segment free the blocks of the zeros after the end: the other steps need that space.

        Segments of zeros keep their names until the marker is written: RocketMQ's store is read from its third-last one on.
        """
        last, zeros = self._plan.log.holder, [(segment.path, 0) for segment, kind in self._plan.log.extra if kind is Extra.SPARE]
        if last is not None and not self._plan.found.notes.has_failed_sync:  # after a failed sync zeros may be in memory only
            zeros.append((last.path, self._end - last.start_offset + self._plan.log.tail_bytes))
        for path, start in zeros:
            if free_bytes(path.parent) < self._log.size_bytes:
                free_end(path, start)

    def _change_log(self) -> None:
        """Quarantine, truncate, drain, clear and sync, in an order in which a crash loses no message."""
        holder = self._plan.log.holder
        remove_from_log(self._plan, self._quarantine)
        for start, content in self._plan.log.drains:
            base = start - start % self._log.size_bytes
            write_at(self._segment_path(base), content, start - base)
            failpoint("recovery_drained")
        if self._plan.log.tail is not Tail.NOTHING and holder is not None:
            clear_file_from(holder.path, self._end - holder.start_offset)
        failpoint("recovery_tail_cleared")
        self._sync_log()
        failpoint("recovery_log_done")

    def _sync_log(self) -> None:
        """Make the log durable from where the reading began to its end.

        Bytes that a dead engine had not synced are rewritten in place first: its last sync may have failed
        unnoticed, and a reader's mapping keeps pages in memory that never reached the disk. The zeros after the end get new
        pages even if all before them is durable. After a failed sync these zeros and the names are written again as well.
        """
        end, size_bytes, sure = self._end, self._log.size_bytes, self._plan.unsure_from
        if sure < end:
            self._log.forget()  # so that it is read again from the disk
        has_failed_sync = self._plan.found.notes.has_failed_sync
        if (holder := self._plan.log.holder) is not None and self._plan.may_have_failed_sync:
            if has_failed_sync:
                clear_file_from(holder.path, end - holder.start_offset, zeros_too=True)
            try:
                renew_zeros(holder.path, end - holder.start_offset)
            except DiskFullError:
                free_end(holder.path, end - holder.start_offset)
        if has_failed_sync:
            for folder in {*(segment.path.parent for segment in self._log.segments), self._store.config}:
                sync_folder(folder)
        for path, base in self._store.list_log():  # with those that the drain has made
            if base >= end or base + size_bytes <= self._plan.log.scan.scan_from:
                continue
            if base + size_bytes > sure and sure < end:
                rewrite(path, max(sure - base, 0), min(end - base, size_bytes))
            else:
                sync_file(path)
        if sure < end:
            self._verify_rewritten(sure)
        if self._plan.copied is not None:
            sync_file_system(self._store.root)  # with config/; the syncs of log, queues and index tell of an error
        if self._plan.copied is not None or self._log.owner is Owner.ROCKETMQ:
            self._sync_names()

    def _verify_rewritten(self, start: int) -> None:
        """Raise DiskError unless the rewritten bytes are still the log that was found."""
        written = replace(self._log, segments=self._store.list_log())
        found = scan_log(written, written.index_of(start) or 0, check_crc=self._plan.options.check_crc_on_recover, limit=self._end)
        if found.end_offset != self._end:
            path = self._store.commit_log
            raise DiskError(f"the log in {path} was whole up to {self._end} and is not beyond {found.end_offset} ({found.reason}), now "
                            "that it was read from the disk: recover again", path=str(path))

    def _sync_names(self) -> None:
        """Sync the names of files of another program: RocketMQ and `cp` do not sync folders, and the watermark will cover these files."""
        folders = {self._store.root, *(segment.path.parent for segment in self._log.segments)}
        for top in (self._store.consume_queue, self._store.consume_queue_ext, self._store.index):
            folders.update(Path(folder) for folder, _, _ in os.walk(top))
        for folder in folders:
            sync_folder(folder)

    def _segment_path(self, base: int) -> Path:
        path = self._store.commit_log_segment(base)
        if not path.exists():
            path = new_segment_folder(self._store, base, self._log.size_bytes) / path.name
            os.close(create_file(path.parent, path.name, self._log.size_bytes, allocate="none"))
        return path

    # -- queues and index

    def _change_queues(self) -> tuple[int, list[QueueState]]:
        """Truncate queues and index and dispatch to them, durably; return where dispatch began, and the queues afterwards."""
        plan = self._plan
        quarantine_orphans(plan, self._quarantine)
        cuts = [] if plan.found.orphans else [cut for cut in plan.cuts if cut.changes_something]
        for cut in cuts:
            _apply_cut(cut)
            failpoint("recovery_queue_cut")
        self._lower_index_time()
        if plan.index.deleted and not plan.found.orphans:
            for file in plan.index.deleted:
                file.path.unlink(missing_ok=True)
            sync_folder(self._store.index)
            failpoint("recovery_index_deleted")
        start = self._dispatch()
        is_unchanged = not cuts and not plan.found.orphans and start >= self._end
        queues = plan.found.queues if is_unchanged else list_queues(self._store)
        self._sync_derived(queues, start)
        return start, queues

    def _lower_index_time(self) -> None:
        """Lower the checkpoint's index time to that of the last file that stays: the next ones, which are made again here if an operator
        removed them, are not synced before all is dispatched."""
        checkpoint, files = self._plan.found.notes.left.checkpoint, self._plan.found.index_files
        kept = files[: len(files) - len(self._plan.index.deleted)]
        kept_ms = kept[-1].header.end_timestamp_ms if kept and kept[-1].header is not None else 0
        if checkpoint.index_msg_timestamp_ms > kept_ms:
            write_checkpoint(self._store, replace(checkpoint, index_msg_timestamp_ms=kept_ms))

    def _dispatch(self) -> int:
        """Dispatch the log to queues and index, from where the plan says; return where that began, earlier if a queue has a gap."""
        start, log_min = self._plan.dispatch_from, max(self._log.min_offset, 0)
        if start < self._end or self._plan.reputter is not None:
            try:
                while (gap := self._dispatch_until_gap(start)) is not None:
                    earlier = record_start(self._log, max(log_min, gap.max_physical))
                    if earlier >= start:  # the queue lacks an entry and has later ones: only the log's first record is early enough
                        folder = self._store.queue_folder(gap.topic, gap.queue_id)
                        self._quarantine.add_file(folder, 0, f"queue {gap.queue_id} of {gap.topic} lacked entries in the middle, and was "
                                                  "rebuilt", kind="queue")
                        earlier = log_min
                    start = earlier
                    self._mark(start)  # what is written from there on is not synced before all is dispatched
            except DiskFullError as error:
                raise DiskFullError(
                    f"{error}. The log is whole up to offset {self._end} and stays as it is; its queues and index need room: "
                    "free some and recover again", errno=error.errno, path=error.path) from error
            except StoreRefusedError as error:
                raise StoreRefusedError(
                    f"{error}. The log is whole up to offset {self._end} and stays as it is; recover again then: it continues from here "
                    "(config/recovery says where)") from error
        failpoint("recovery_dispatched")
        return start

    def _dispatch_until_gap(self, start: int) -> QueueGap | None:
        """Dispatch the log from `start` on; stop and return the gap if a queue would have one that the log can fill."""
        store, end, log_min, scan = self._store, self._end, max(self._log.min_offset, 0), self._plan.log.scan
        scanned_bytes = scan.end_offset - scan.scan_from
        gaps: list[QueueGap] = []

        def on_gap(gap: QueueGap) -> bool:
            gaps.append(gap)
            return start > log_min or gap.max_physical > log_min

        undo = None if self._plan.reputter is None else bytearray(self._plan.reputter.index_progress or b"")
        written = replace(self._log, segments=store.list_log())  # with those that the drain has made
        with contextlib.closing(Dispatcher(store, store.geometry, self._plan.options, index_progress=undo, on_gap=on_gap)) as dispatcher:
            for piece in written.runs(start, end, next_record, DISPATCH_SLICE_BYTES):
                if isinstance(piece, LogDamage):  # RocketMQ's log may have damage that its recovery never reads
                    self._notes.append(f"nothing between {piece.start} and {piece.end} could be dispatched ({piece.reason})")
                    continue
                reached = dispatcher.dispatch(piece.segment.view, piece.segment.base, piece.start, piece.end)
                if dispatcher.stopped_by == GAP:
                    return gaps[-1]
                piece.stopped(reached, dispatcher.stopped_by)
                self._progress(scanned_bytes + min(reached, end) - start, scanned_bytes + end - start)
        return None

    def _sync_derived(self, queues: list[QueueState], start: int) -> None:
        """Sync what has entries or keys of records from `start` on, or from where the reading of the log began.

        After a failed sync queues are rewritten, as the log is. Index files that may not be on the disk were made again.
        """
        store, unsynced_from = self._store, min(start, self._plan.log.scan.scan_from)
        has_failed_sync = self._plan.found.notes.has_failed_sync
        unsynced = [queue for queue in queues if queue.max_physical_offset > unsynced_from]
        is_synced = len(unsynced) >= MANY_FILES and sync_file_system(store.consume_queue)
        for queue in unsynced:
            sync_queue(queue, unsynced_from, is_synced=is_synced, has_failed_sync=has_failed_sync)
            if self._plan.options.enable_consume_queue_ext:
                for extension in list_segments(store.queue_ext_folder(queue.topic, queue.queue_id), store.queue_ext_file_bytes):
                    _sync_queue_file(extension.path, has_failed_sync=has_failed_sync)
        synced_ms = read_checkpoint(store).index_msg_timestamp_ms if self._plan.copied is None else -1
        for file in list_index(store):
            if start < self._end or file.header is not None and file.header.end_timestamp_ms > synced_ms:
                sync_file(file.path)
        failpoint("recovery_derived_synced")

    # -- the end

    def _finish(self) -> None:
        """Note that all is done, the abort file and the markers last."""
        plan, store, notes, watermark = self._plan, self._store, self._plan.found.notes, self._plan.watermark
        if notes.rebuilding is not None:
            _restore_queue_times(store, notes.rebuilding)
        layout, last_ms = store.geometry.index_layout, max(0, plan.last_stored_ms)
        full = [file.header for file in list_index(store) if file.header is not None and layout.is_full(file.header.index_count)]
        write_checkpoint(store, Checkpoint(last_ms, last_ms, full[-1].end_timestamp_ms if full else 0))
        failpoint("recovery_checkpoint_written")
        if watermark is not None and (plan.copied is not None or watermark.flushed != self._end):
            write_watermark(store, watermark.moved_to(self._end))
            failpoint("recovery_watermark_written")
        if self._log.owner is Owner.ROCKETMQ and plan.next_read_from < plan.log.scan.scan_from:
            write_recovered_from(store, plan.log.scan.scan_from)
        failpoint("recovery_kept_noted")
        if notes.failure is not None or notes.has_failed_sync:
            SYNC_FAILURE.remove(store)
        if (cut := notes.cut) is not None:
            CUT.remove(store)
            failpoint("cut_done")
            self._notes.append(f"the log was cut at {cut.at}, {cut.end - cut.at:,} bytes of it are in quarantine: {cut.reason}")
        remove_abort_file(store)
        failpoint("recovery_abort_removed")
        REBUILD.remove(store)
        RECOVERY.remove(store)
        failpoint("recovery_marker_removed")

    def _next_offsets(self, queues: list[QueueState]) -> dict[tuple[str, int], int]:
        """Return the next queue offset, by the log, of each queue that ends before its last message in what was read just before.

        Its pages are in memory; for a correct queue only one number is compared. Nothing is returned in RocketMQ's stores, where
        an entry's position is its offset, whatever the record has.
        """
        found: dict[tuple[str, int], int] = {}
        read_from = self._plan.log.scan.scan_from if self._log.owner is Owner.PYENGINE else self._end
        asked = [(queue.last_offset, queue) for queue in queues if read_from <= queue.last_offset < self._end]
        for last, queue in sorted(asked, key=lambda one: one[0]):
            base, _, view = self._log.view_at(last) or (last, last, b"")
            at = last - base
            if at + QUEUE_OFFSET_AT + I64.size > len(view) or I64.unpack_from(view, at + QUEUE_OFFSET_AT)[0] < queue.max_offset:
                continue
            with contextlib.suppress(FormatError):
                message = decode_record(view, at)
                if (message.topic, message.queue_id, message.physical_offset) == (queue.topic, queue.queue_id, last):
                    found[queue.topic, queue.queue_id] = message.queue_offset + 1
        for topic, queue_id in sorted(found):
            self._notes.append(f"queue {queue_id} of {topic} lacks entries, since its last message has a higher queue offset than "
                               f"its entry: run {command('rebuild', 'STORE', '--topic', topic, '--queue-id', queue_id)}")
        return found


def remove_from_log(plan: RecoveryPlan, quarantine: Quarantine) -> None:
    """Quarantine what leaves the log, and remove the segments after its end, newest first; a dry run of `quarantine` only lists it."""
    change, log, end, cut, holder = plan.log, plan.files, plan.log.end_offset, plan.log.cut, plan.log.holder
    if not quarantine.dry_run:
        remove_last_spares(plan)  # the copies need room
    for start, content in change.stranded_pool:
        quarantine.add_memory(start, content, f"pool bytes after the end of the log at {end}")
    if change.tail.may_be_message and holder is not None and not (cut and cut.kept):  # half cleared it is never copied again
        quarantine.add_bytes(holder.path, holder.start_offset, end, holder.start_offset + log.size_bytes,
                             cut.reason if cut else f"after the end of the log at {end} ({change.scan.reason})")
    if cut and not cut.kept and not quarantine.dry_run:
        intend_cut(plan.found.store, replace(cut, kept=True))
        failpoint("cut_kept")
    for segment, kind in reversed(change.extra):
        log.forget(segment.path)
        if kind is Extra.STRANDED:
            if plan.may_have_failed_sync and not quarantine.dry_run:  # a sync alone would skip pages that the last one could not write
                start = max(0, plan.unsure_from - segment.start_offset)
                rewrite(segment.path, start, used_end(segment.path, start))
            quarantine.add_file(segment.path, segment.start_offset, cut.reason if cut else f"{Extra.STRANDED}: the log ends at {end}")
        elif not quarantine.dry_run:
            _remove_segment(segment.path)
        failpoint("recovery_segment_gone")


def remove_last_spares(plan: RecoveryPlan) -> None:
    """Remove the segments of zeros after the last other one, newest first. May be repeated."""
    for segment, _ in takewhile(lambda one: one[1] is Extra.SPARE, reversed(plan.log.extra)):
        plan.files.forget(segment.path)
        _remove_segment(segment.path)


def _remove_segment(path: Path) -> None:
    """Remove the segment durably, if it still exists."""
    if path.exists():
        path.unlink()
        sync_folder(path.parent)


def quarantine_orphans(plan: RecoveryPlan, quarantine: Quarantine) -> None:
    """Move the folders that have no log to quarantine."""
    for folder in plan.found.orphans:
        quarantine.add_file(folder, 0, "the commit log that these belong to does not exist", kind="derived")


def _apply_cut(cut: QueueCut) -> None:
    """Truncate the queue, durably. May be repeated; an empty folder is removed, and then its topic's folder if that is empty."""
    for file in cut.deleted:
        file.path.unlink(missing_ok=True)
    if cut.cleared is not None:
        clear_file_from(cut.cleared.path, cut.clear_from)
    if cut.after.files:
        sync_folder(cut.after.folder)
        return
    for empty in (cut.after.folder, cut.after.folder.parent):
        try:
            empty.rmdir()
        except FileNotFoundError:
            continue
        except OSError:  # the folder has other files
            sync_folder(empty)
            return
        sync_folder(empty.parent)


def sync_queue(queue: QueueState, from_physical_offset: int, *, is_synced: bool, has_failed_sync: bool) -> None:
    """fsync the files (sync_file) with entries of records at or after `from_physical_offset`; raises FlushError."""
    for file in reversed(queue.files):
        _sync_queue_file(file.path, is_synced=is_synced, has_failed_sync=has_failed_sync)
        first = read_entry(file.path, 0)
        if is_live(first) and not is_filler(first) and first[0] < from_physical_offset:
            return


def _sync_queue_file(path: Path, *, is_synced: bool = False, has_failed_sync: bool) -> None:
    if has_failed_sync:
        rewrite(path, 0, used_end(path))
    else:
        sync_file(path, is_synced=is_synced)


def _restore_queue_times(store: MessageStore, marker: RebuildMarker) -> None:
    """Set the times of the files of all queues of `marker`. May be repeated."""
    log = store.open_log(MappingCache(mappings_max=8))
    for queue in list_queues(store):
        folder = queue.folder.relative_to(store.root)
        if any(str(piece) in marker.pieces for piece in (folder, *folder.parents)):
            for path, time_ns in _times(queue, marker.moved_path(store, str(folder)), log):
                os.utime(path, ns=(time_ns, time_ns))


def _times(queue: QueueState, replaced: Path, log: MappedFileQueue) -> Iterable[tuple[Path, int]]:
    """Yield (file, modification time) from the newest to the oldest; files without a message keep their time.

    It is the store time of the last entry's message, or the time of the replaced file if that is not earlier and not later
    than the next file's.
    """
    following_ns: int | None = None
    for file in reversed(queue.files):
        stored_ms = _last_store_time_ms(queue, file.path, file.start_offset, log)
        if stored_ms < 0:
            continue
        time_ns = stored_ms * _NS_PER_MS
        try:
            before_ns = os.stat(replaced / file.path.name).st_mtime_ns
        except OSError:
            before_ns = -1
        if before_ns >= time_ns and (following_ns is None or before_ns <= following_ns):
            time_ns = before_ns
        yield file.path, time_ns
        following_ns = time_ns


def _last_store_time_ms(queue: QueueState, path: Path, start: int, log: MappedFileQueue) -> int:
    last = min(queue.end - start, queue.size_bytes) - CQ_ENTRY_BYTES
    if last < 0:
        return -1
    entry = read_entry(path, last)
    return -1 if is_filler(entry) else message_stored_ms(log, entry[0], entry[1])
