"""FlushConsumeQueueService and StoreCheckpoint: sync queues and index, and note on the disk how far all files are durable.

Once in flush_interval_consume_queue_ms:

    1 read the targets: `reput_from`, `flushed`, and the end of the log with its store time
    2 sync the queue files that have entries of the records since the last round;
      enter new topics into config/topics.json
    3 sync the index files that became full since
    4 write `checkpoint` (three store times) and `config/watermark` (flushed)

In a store that another program wrote, AdoptedLog reads a slice of the old log between two rounds.

The values that step 4 writes were read before steps 2 and 3, which make them durable: no value is ever ahead of the files. A round
costs one sync for each queue file that was touched (or one of the file system, if many were), so idle queues cost nothing. This
worker's line of the control block says how far queues are durable, for its next incarnation.

Like RocketMQ, this service syncs a partly filled index file only at stop, and takes the index time from
full files: new keys dirty pages all over the file, so that each sync would write most of it.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence

from pyengine.errors import DiskError, EngineError, FlushError, FormatError, disk_error, disk_errors
from pyengine.events import Event, Report
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import decode_ext_address, is_ext_address, unpack_entry
from pyengine.formats.paths import segment_name, segment_start
from pyengine.formats.record import CaseLabel
from pyengine.formats.small_file import Checkpoint, opened
from pyengine.native import control as native
from pyengine.native.dispatch import touched_queues
from pyengine.native.failpoints import failpoint
from pyengine.native.flush import check_written, fdatasync, monotonic_ns, sync_file_system
from pyengine.native.scan import walk
from pyengine.services.service import BlockedReason, Service, ServiceContext
from pyengine.storage.checkpoint import WATERMARK, DurableWatermark, read_checkpoint, read_watermark, write_checkpoint
from pyengine.storage.commit_log import LogDamage
from pyengine.storage.config import EngineConfig
from pyengine.storage.config_table import TopicConfigs
from pyengine.storage.durable_writes import MANY_FILES
from pyengine.storage.index_file import read_index_header
from pyengine.storage.mapped_file import index_file_names, mapped
from pyengine.storage.message_store import MessageStore

WATERMARK_INTERVAL_NS = 1_000_000_000
PAUSE_ROUNDS = 10  # the pause after a round is at least this many times as long as the round
SLICE_BYTES = 8 << 20
RETRY_NS = 1_000_000_000


class FlushConsumeQueueService(Service):
    """Syncs queues and index, writes checkpoint and watermark."""

    KIND = native.CHECKPOINTER
    records_rounds = True

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        config = context.config
        self._queue_file_bytes = config.geometry.mapped_file_size_consume_queue_bytes
        self._ext_file_bytes = config.mapped_file_size_consume_queue_ext_bytes if config.enable_consume_queue_ext else 0
        self._index_enabled = config.message_index_enable
        self._multi_dispatch = config.enable_multi_dispatch
        self._topic_queue_nums, self._own_topics = config.put_topic_queue_nums, config.own_topics
        self.take_settings(config)
        self._watermark_due_ns = 0
        self._checkpoint = read_checkpoint(context.store.root)
        self._written = read_watermark(context.store.root).watermark
        self._waiting = native.committed_slot(self._control)  # an earlier end of the log, kept until it is flushed, and its time
        own, flushed = self._written, native.load_position(self._control.flushed)
        if own is None or own.uuid != str(self._memory.store_uuid):  # this engine has read nothing of the log yet
            own = DurableWatermark("", 0, flushed, flushed, flushed)
        self._ordered_from = own.ordered_from
        self._adopted = AdoptedLog(context.store, own.verified_from,
                                   lambda: native.load_position(self._control.min_offset), context.report)
        self._reasons.append(self._adopted.blocked)
        self._topics = TopicConfigs(context.store.root)
        self._topics_blocked = BlockedReason(context.report)
        self._entered: dict[str, int] = {}  # topic -> the highest queue id that its entry in topics.json covers
        self._entered_stamp = 0             # the stamp of topics.json for which `_entered` is right
        self._synced_index = ""  # the newest index file that was full when it was synced

    def take_settings(self, config: EngineConfig) -> None:
        """Take the interval; the next round is due at once."""
        self._interval_ns = config.flush_interval_consume_queue_ms * 1_000_000
        self._due_ns = 0

    def work(self) -> bool:
        """Run a round, and read a slice of the old log, if they are due."""
        began_ns = monotonic_ns()
        if began_ns >= self._due_ns:
            self._try_round(final=False)
            now_ns = monotonic_ns()
            self._due_ns = now_ns + max(self._interval_ns, PAUSE_ROUNDS * (now_ns - began_ns))
        if not self._is_frozen:
            try:
                self._adopted.work()
            except FlushError as error:
                self._freeze(error)
        return False

    def _try_round(self, *, final: bool) -> None:
        if self._is_frozen:
            return  # recovery must find the files as they are now
        try:
            with disk_errors("read the log, queues or index of", self._store):
                self._round(final=final)
        except FlushError as error:
            self._freeze(error)
        except DiskError as error:
            self._blocked.set(str(error), f"checkpoint and watermark cannot be written: {error}")
            self._count_error()
        else:
            self._blocked.clear("checkpoint and watermark can be written again")

    def _round(self, *, final: bool) -> None:
        target = native.load_position(self._control.reput_from)
        flushed, newest = native.load_position(self._control.flushed), native.committed_slot(self._control)
        logics_ms = self._sync_queues(native.load(self._line, "position"), target)
        flushed_ms = max((time_ms for end, time_ms in (self._waiting, newest, (target, logics_ms)) if end <= flushed), default=0)
        if self._waiting[0] <= flushed:
            self._waiting = newest
        index_ms = self._sync_index(final=final)
        failpoint("derived_synced")
        native.store(self._line, "position", target)
        failpoint("derived_noted")
        checkpoint = Checkpoint(
            max(self._checkpoint.physic_msg_timestamp_ms, flushed_ms),
            max(self._checkpoint.logics_msg_timestamp_ms, logics_ms),
            max(self._checkpoint.index_msg_timestamp_ms, index_ms))
        if checkpoint != self._checkpoint:
            write_checkpoint(self._store.root, checkpoint)
            self._checkpoint = checkpoint
        failpoint("checkpoint_noted")
        self._write_watermark(flushed, final=final)
        failpoint("watermark_noted")

    # -- queues

    def _sync_queues(self, start: int, end: int) -> int:
        """Sync the queue files with entries of the records in [start, end); return the last record's store time, -1 without one."""
        last_ms = -1
        spans: dict[tuple[str, int], tuple[int, int]] = {}
        newest: list[tuple[str, int, int]] = []
        for run in self._store.log_between(start, end).runs(start, end):
            if isinstance(run, LogDamage):
                path = self._store.commit_log_segment(segment_start(run.start, self._segment_bytes))
                raise DiskError(f"the log cannot be read at {run.start} ({run.reason})", path=str(path))
            touched = touched_queues(run.segment.view, run.segment.base, run.start, run.end, multi_dispatch=self._multi_dispatch)
            run.stopped(touched.reached, touched.reason)
            last_ms = max(last_ms, touched.last_store_timestamp_ms)
            for queue in touched.queues:
                newest.append((queue.topic, queue.queue_id, queue.newest_ms))
                low, high = spans.get((queue.topic, queue.queue_id), (queue.min_queue_offset, queue.max_queue_offset))
                spans[queue.topic, queue.queue_id] = min(low, queue.min_queue_offset), max(high, queue.max_queue_offset)
            self._heartbeat()
        self._enter_topics(newest)
        is_synced = len(spans) >= MANY_FILES and sync_file_system(self._store.consume_queue)
        for (topic, queue_id), (low, high) in spans.items():
            self._sync_queue(topic, queue_id, low, high, is_synced)
            self._heartbeat()
        return last_ms

    def _enter_topics(self, queues: Sequence[tuple[str, int, int]]) -> None:
        """Enter the topics of these queues into topics.json if they are missing. After a failure the next put to the topic tries again."""
        stamp = self._topics._stamp
        if stamp != self._entered_stamp:  # another process has changed the file, and may have deleted a topic
            self._entered.clear()
        fresh = [queue for queue in queues if self._entered.get(queue[0], -1) < queue[1]]
        if not fresh:
            return
        try:
            deleted = self._topics._enter(fresh, self._topic_queue_nums, self._own_topics)
        except FlushError:
            raise
        except EngineError as error:
            self._topics_blocked.set(str(error), f"new topics are not entered into topics.json: {error}")
            return
        self._topics_blocked.clear("new topics are entered into topics.json again")
        for topic, queue_id, _ in fresh:
            if topic not in deleted:
                self._entered[topic] = max(queue_id, self._entered.get(topic, -1))
        self._entered_stamp = stamp  # read before enter(), so that the next round sees a deletion in between

    def _sync_queue(self, topic: str, queue_id: int, low: int, high: int, is_synced: bool) -> None:
        size = self._queue_file_bytes
        folder = self._store.queue_folder(topic, queue_id)
        first = low * CQ_ENTRY_BYTES // size * size
        if self._ext_file_bytes:
            self._sync_ext(topic, queue_id, low, high, is_synced)
        for start in range(first, high * CQ_ENTRY_BYTES + 1, size):
            self._sync_derived(str(folder / segment_name(start)), is_synced)

    def _sync_ext(self, topic: str, queue_id: int, low: int, high: int, is_synced: bool) -> None:
        """Sync the extension files with the units that the queue's entries [low, high] point to."""
        addresses = [address for address in (self._ext_address(topic, queue_id, low), self._ext_address(topic, queue_id, high))
                     if address is not None]
        if not addresses:
            return
        size = self._ext_file_bytes
        folder = self._store.queue_ext_folder(topic, queue_id)
        for start in range(min(addresses) // size * size, max(addresses) + 1, size):
            self._sync_derived(str(folder / segment_name(start)), is_synced)

    def _ext_address(self, topic: str, queue_id: int, offset: int) -> int | None:
        """Return the address of the extension unit that an entry points to; None if it points to none."""
        start = offset * CQ_ENTRY_BYTES // self._queue_file_bytes * self._queue_file_bytes
        try:
            with open(self._store.queue_folder(topic, queue_id) / segment_name(start), "rb", buffering=0) as file:
                file.seek(offset * CQ_ENTRY_BYTES - start)
                tags_code = unpack_entry(file.read(CQ_ENTRY_BYTES)).tags_code
        except (FileNotFoundError, FormatError):
            return None
        return decode_ext_address(tags_code) if is_ext_address(tags_code) else None

    def _sync_derived(self, path: str, is_synced: bool = False) -> None:
        """Sync one file of queues or index; `is_synced`: its file system was synced, so check only for a write error.

        A file that does not exist (it was removed, or never created) is skipped.
        """
        with contextlib.suppress(FileNotFoundError):
            _sync_file(path, check_written if is_synced else fdatasync)
            failpoint("derived_file_synced")

    # -- index

    def _sync_index(self, *, final: bool) -> int:
        """Sync the index files that became full (`final`: the last one too); return the newest synced file's end time, 0 without one."""
        if not self._index_enabled:
            return 0
        names = index_file_names(self._store.index)
        index_ms = 0
        for name in [name for name in names[:-1] if name > self._synced_index]:
            path = self._store.index / name
            self._sync_derived(str(path))
            with contextlib.suppress(FileNotFoundError):
                index_ms = read_index_header(path).end_timestamp_ms
            self._synced_index = name
            self._heartbeat()
        if final and names:
            self._sync_derived(str(self._store.index / names[-1]))
        return index_ms

    # -- watermark

    def _write_watermark(self, flushed: int, *, final: bool) -> None:
        now_ns = monotonic_ns()
        memory, verified_from = self._memory, min(self._adopted.verified_from, flushed)
        ordered_from = max(self._ordered_from, native.load(self._control.writer, "ordered_from"))
        if ordered_from <= native.load_position(self._control.min_offset):
            ordered_from = 0  # the records before it are deleted
        watermark = DurableWatermark(str(memory.store_uuid), memory.identity.epoch, flushed, verified_from, min(ordered_from, flushed))
        if watermark == self._written or now_ns < self._watermark_due_ns and not final:
            return
        WATERMARK.write(self._store.root, watermark)
        self._written = watermark
        self._watermark_due_ns = now_ns + WATERMARK_INTERVAL_NS

    def pause_s(self) -> float:
        return min(max(0.0, (self._due_ns - monotonic_ns()) / 1e9), math.inf if self._is_frozen else self._adopted.pause_s())

    def drain(self) -> bool:
        """Run the last round; flusher and reputter have ended by now."""
        self._try_round(final=True)
        return False


class AdoptedLog:
    """Reads and checks the log that was written before this engine, so that the watermark covers only what was read.

    A store of RocketMQ, or one whose watermark is lost, is ready after recovery has checked the tail of its log. This object
    reads the rest, segment by segment, the newest first: it syncs the segment, then checks each record as `pyengine check` does.
    After each undamaged segment `verified_from` moves to the segment's start; at the start of the log it becomes 0 and the work
    is done. At damage the work ends and `verified_from` stays: records below it are served as RocketMQ would serve them, and
    a later recovery does not stop for damage there, since it is older than this engine.
    """

    def __init__(self, store: MessageStore, verified_from: int, min_offset: Callable[[], int],
                 report: Report) -> None:
        """`min_offset` returns the current start of the log; `report` gets a sentence at the end of the work."""
        self.verified_from = verified_from if verified_from > min_offset() else 0
        self.blocked = BlockedReason(report)  # the damage, or why the log cannot be read at present
        self._is_done = not self.verified_from
        self._store = store
        self._segment_bytes = store.segment_bytes
        self._min_offset = min_offset
        self._report = report
        self._at = -1  # the next record of the segment that is being read; -1 between two segments
        self._due_ns = 0

    def work(self) -> None:
        """Read a slice if one is due; the pause after it is as long as it took. Raises FlushError."""
        if self.pause_s() > 0:
            return
        began_ns = monotonic_ns()
        try:
            self._read()
        except FlushError:
            self._is_done = True
            raise
        except DiskError as error:
            self.blocked.set(str(error), f"the log from before this engine cannot be read: {error}; "
                                         f"trying again each {RETRY_NS / 1e9:g} s")
            self._due_ns = monotonic_ns() + RETRY_NS
        else:
            if not self._is_done:
                self.blocked.clear()
            self._due_ns = 2 * monotonic_ns() - began_ns

    def pause_s(self) -> float:
        """Return the time until the next slice is due; infinity when the work is done."""
        return math.inf if self._is_done else max(0.0, (self._due_ns - monotonic_ns()) / 1e9)

    def _read(self) -> None:
        top = self.verified_from
        base = (top - 1) // self._segment_bytes * self._segment_bytes
        path = self._store.commit_log_segment(base)
        try:
            if self._skip_if_deleted(base):
                return
            if self._at < 0:
                _sync_file(str(path), fdatasync)
                self._at = base
            with mapped(path) as view:
                found = walk(view, base, self._at, min(self._at + SLICE_BYTES, top), limit=top)
            self._at = found.end_offset
            if found.reason == CaseLabel.RANGE_END and self._at < top:
                return
            is_whole = found.reason in (CaseLabel.RANGE_END, CaseLabel.BLANK)
            why = f"damaged at {self._at} ({found.reason})"
        except FileNotFoundError:
            is_whole, why = False, f"not whole: {path} is missing"
        if is_whole:
            failpoint("adopted_segment_read")
            self._move_to(base)
        elif not self._skip_if_deleted(base):
            self._is_done = True
            damage = (
                f"the log is {why}, in the part from before this engine; everything from {top} on was read and is whole. "
                "Restore that segment from a copy and start again, or make a store without the damage: stop, then "
                "`pyengine salvage STORE DEST`")
            self.blocked.set(damage, damage, event=Event.LOG_DAMAGED)

    def _skip_if_deleted(self, base: int) -> bool:
        """End the work if the cleaner has deleted the segment, whose bytes then read as zeros; return whether it has."""
        if base >= self._min_offset():
            return False
        self._move_to(base)
        return True

    def _move_to(self, base: int) -> None:
        self._at = -1
        self.verified_from = base if base > self._min_offset() else 0
        if not self.verified_from:
            self._is_done = True
            self._report(Event.OLD_LOG_READ, "the log from before this engine is read and whole: the watermark covers all of it")


def _sync_file(path: str, sync: Callable[[int, str], None]) -> None:
    """Open a file and `sync` it. Raises FileNotFoundError; DiskError when it cannot be opened, FlushError when the sync fails."""
    try:
        with opened(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
            sync(descriptor, path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise disk_error(error, "open", path) from error
