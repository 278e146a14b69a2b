"""FlushConsumeQueueService and StoreCheckpoint: how far everything is durable, on disk.

Once in flush_interval_consume_queue_ms:

    1 read the targets: `reput_from`, and (flushed, its store time) as one pair
    2 which queue files did the records since the last round touch? sync those
    3 sync the index files that were filled since; enter new topics into config/topics.json
    4 write `checkpoint` (three store times) and `config/watermark` (flushed)

In a store that another program wrote, AdoptedLog reads slices of its log in between.

Everything written in 4 was read before 2 and 3 and is durable by then, so no value is
ever ahead. A queue's round costs a sync per touched file (or one of the file system, where many
were touched), not per queue of the store, so 100,000 queues at rest cost nothing. This worker's line of
the control block says how far queues are durable, for its next incarnation.

RocketMQ flushes a partly filled index file only at stop and takes the index time from
full ones; so does this: its slots are dirtied all over.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable

from pyengine.errors import DiskError, EngineError, FlushError, FormatError, disk_error
from pyengine.events import Event, Report
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import decode_ext_address, is_ext_address, unpack_entry
from pyengine.formats.index_file import unpack_header
from pyengine.formats.paths import segment_name
from pyengine.formats.record_case import CaseLabel
from pyengine.formats.small_file import Checkpoint
from pyengine.native import control as native
from pyengine.native.failpoint import failpoint
from pyengine.native.flush import check_written, fdatasync, monotonic_ns, sync_file_system
from pyengine.native.scan import walk
from pyengine.services.service import BlockedReason, Service, ServiceContext
from pyengine.storage.checkpoint import DurableWatermark, read_checkpoint, write_checkpoint, write_watermark
from pyengine.storage.config import EngineConfig
from pyengine.storage.config_table import TopicConfigs
from pyengine.storage.dispatcher import touched_queues
from pyengine.storage.durable_writes import MANY_FILES
from pyengine.storage.mapped_file import index_file_names, mapped
from pyengine.storage.message_store import MessageStore

WATERMARK_INTERVAL_NS = 1_000_000_000
SHARE = 10  # a round that took long is followed by a pause this many times as long
INDEX_HEADER_BYTES = 40
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
        self._default_topic_queue_nums = config.default_topic_queue_nums
        self.take_settings(config)
        self._watermark_due_ns = 0
        self._checkpoint = read_checkpoint(context.store.root)
        self._watermark = (-1, 0)
        self._adopted = AdoptedLog(context.store, self._unread_end(),
                                   lambda: native.load_position(self._control.min_offset), context.report)
        self._topics = TopicConfigs(context.store.root)
        self._topics_blocked = BlockedReason(context.report)
        self._entered: dict[str, int] = {}  # topic -> the highest queue that its entry is known to cover
        self._entered_stamp = 0             # of the file that this was read from
        self._synced_index = ""  # the newest index file that is synced for good

    def take_settings(self, config: EngineConfig) -> None:
        """The interval; the next round is due at once."""
        self._interval_ns = config.flush_interval_consume_queue_ms * 1_000_000
        self._due_ns = 0

    @property
    def blocked_reason(self) -> str:
        """What cannot be written; else, what of the log cannot be read or is damaged since before this engine."""
        return self._blocked.text or self._adopted.blocked.text

    def _unread_end(self) -> int:
        """Where the part of the log ends that this engine has not read: all of it, without a watermark of its own."""
        own = self._store.read_watermark().watermark
        if own is not None and own.uuid == str(self._memory.identity.store_uuid):
            return own.verified_from
        return native.load_position(self._control.flushed)

    def work(self) -> bool:
        """A round, and a slice of what has not been read yet, if they are due."""
        began_ns = monotonic_ns()
        if began_ns >= self._due_ns:
            self._try_round(final=False)
            now_ns = monotonic_ns()
            self._due_ns = now_ns + max(self._interval_ns, SHARE * (now_ns - began_ns))
        if not self._is_frozen:
            try:
                self._adopted.work()
            except FlushError as error:
                self._freeze(error)
        return False

    def _try_round(self, *, final: bool) -> None:
        if self._is_frozen:
            return  # what is on the disk now is what recovery must work with
        try:
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
        flushed, flushed_ms = native.flush_pair(self._control)
        logics_ms = self._sync_queues(native.load(self._line, "position"), target)
        index_ms = self._sync_index(final=final)
        failpoint("derived_synced")
        native.store(self._line, "position", target)
        failpoint("derived_noted")
        self._write_checkpoint(Checkpoint(
            max(self._checkpoint.physic_msg_timestamp_ms, flushed_ms),
            max(self._checkpoint.logics_msg_timestamp_ms, logics_ms),
            max(self._checkpoint.index_msg_timestamp_ms, index_ms)))
        failpoint("checkpoint_noted")
        self._write_watermark(flushed, final=final)
        failpoint("watermark_noted")

    # -- queues

    def _sync_queues(self, start: int, end: int) -> int:
        """Sync the queue files that the records of [start, end) went to; store time of the last record, -1 without."""
        last_ms = -1
        spans: dict[tuple[str, int], tuple[int, int]] = {}
        while start < end:
            base = start - start % self._segment_bytes
            stop = min(end, base + self._segment_bytes)
            with mapped(self._store.commit_log_segment(base)) as view:
                touched = touched_queues(view, base, start, stop, multi_dispatch=self._multi_dispatch)
            if touched.reason not in ("range_end", "blank"):
                raise DiskError(f"the log cannot be read at {touched.reached} ({touched.reason})",
                                path=str(self._store.commit_log_segment(base)))
            last_ms = max(last_ms, touched.last_store_timestamp_ms)
            for queue in touched.queues:
                low, high = spans.get((queue.topic, queue.queue_id), (queue.min_queue_offset, queue.max_queue_offset))
                spans[queue.topic, queue.queue_id] = min(low, queue.min_queue_offset), max(high, queue.max_queue_offset)
            start = stop
            self._beat()
        self._enter_topics(spans)
        is_synced = len(spans) >= MANY_FILES and sync_file_system(self._store.consume_queue)
        for (topic, queue_id), (low, high) in spans.items():
            self._sync_queue(topic, queue_id, low, high, is_synced)
            self._beat()
        return last_ms

    def _enter_topics(self, queues: Iterable[tuple[str, int]]) -> None:
        """Make entries in topics.json for topics of these queues that have none. What cannot be entered waits for the next put."""
        stamp = self._topics.stamp
        if stamp != self._entered_stamp:  # another process has changed the file, and may have removed a topic
            self._entered.clear()
        fresh: dict[str, int] = {}
        for topic, queue_id in queues:
            if self._entered.get(topic, -1) < queue_id:
                fresh[topic] = max(queue_id, fresh.get(topic, -1))
        if not fresh:
            return
        try:
            self._topics.enter(fresh, self._default_topic_queue_nums)
        except FlushError:
            raise
        except EngineError as error:
            self._topics_blocked.set(str(error), f"new topics are not entered into topics.json: {error}")
            return
        self._topics_blocked.clear("new topics are entered into topics.json again")
        self._entered |= fresh
        self._entered_stamp = self._topics.stamp

    def _sync_queue(self, topic: str, queue_id: int, low: int, high: int, is_synced: bool) -> None:
        size = self._queue_file_bytes
        folder = self._store.queue_folder(topic, queue_id)
        first = low * CQ_ENTRY_BYTES // size * size
        if self._ext_file_bytes:
            self._sync_ext(topic, queue_id, low, high, is_synced)
        for start in range(first, high * CQ_ENTRY_BYTES + 1, size):
            self._sync_derived(str(folder / segment_name(start)), is_synced)

    def _sync_ext(self, topic: str, queue_id: int, low: int, high: int, is_synced: bool) -> None:
        """Sync the extension files of the units that the queue's entries [low, high] name."""
        addresses = [address for address in (self._ext_address(topic, queue_id, low), self._ext_address(topic, queue_id, high))
                     if address is not None]
        if not addresses:
            return
        size = self._ext_file_bytes
        folder = self._store.queue_ext_folder(topic, queue_id)
        for start in range(min(addresses) // size * size, max(addresses) + 1, size):
            self._sync_derived(str(folder / segment_name(start)), is_synced)

    def _ext_address(self, topic: str, queue_id: int, offset: int) -> int | None:
        """The unit that an entry names, None without one."""
        start = offset * CQ_ENTRY_BYTES // self._queue_file_bytes * self._queue_file_bytes
        try:
            with open(self._store.queue_folder(topic, queue_id) / segment_name(start), "rb", buffering=0) as file:
                file.seek(offset * CQ_ENTRY_BYTES - start)
                tags_code = unpack_entry(file.read(CQ_ENTRY_BYTES)).tags_code
        except (FileNotFoundError, FormatError):
            return None
        return decode_ext_address(tags_code) if is_ext_address(tags_code) else None

    def _sync_derived(self, path: str, is_synced: bool = False) -> None:
        """Sync one file of queues or index; where its file system was synced, ask only whether that worked.

        A file that does not exist (removed meanwhile, or never made) needs none.
        """
        with contextlib.suppress(FileNotFoundError):
            _sync_file(path, check_written if is_synced else fdatasync)
            failpoint("derived_file_synced")

    # -- index

    def _sync_index(self, *, final: bool) -> int:
        """Sync the files that are full (all of them at stop); end time of the newest full one, 0 without."""
        if not self._index_enabled:
            return 0
        try:
            names = index_file_names(self._store.index)
        except FileNotFoundError:
            return 0
        full = names[:-1]
        index_ms = 0
        for name in [name for name in full if name > self._synced_index]:
            path = str(self._store.index / name)
            self._sync_derived(path)
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                index_ms = unpack_header(file.read(INDEX_HEADER_BYTES)).end_timestamp_ms
            self._synced_index = name
            self._beat()
        if final and names:
            self._sync_derived(str(self._store.index / names[-1]))
        return index_ms

    # -- what is written about it

    def _write_checkpoint(self, checkpoint: Checkpoint) -> None:
        if checkpoint != self._checkpoint:
            write_checkpoint(self._store.root, checkpoint)
            self._checkpoint = checkpoint

    def _write_watermark(self, flushed: int, *, final: bool) -> None:
        now_ns = monotonic_ns()
        verified_from = min(self._adopted.verified_from, flushed)
        if (flushed, verified_from) == self._watermark or now_ns < self._watermark_due_ns and not final:
            return
        identity = self._memory.identity
        write_watermark(self._store.root, DurableWatermark(str(identity.store_uuid), identity.epoch, flushed, verified_from))
        self._watermark = flushed, verified_from
        self._watermark_due_ns = now_ns + WATERMARK_INTERVAL_NS

    def pause_s(self) -> float:
        return min(max(0.0, (self._due_ns - monotonic_ns()) / 1e9), self._adopted.pause_s())

    def drain(self) -> bool:
        """The last round; flusher and reputter are gone by now."""
        self._try_round(final=True)
        return False


class AdoptedLog:
    """Reads the log that is older than this engine, so that the watermark covers nothing unread.

    A store of RocketMQ, or one whose watermark is lost, is ready after the check of its tail. The rest is
    read here, segment by segment, the newest first: synced, then every record checked as `check` does.
    Each whole segment moves `verified_from` to its start; at the log's beginning it is 0 and the work is
    done. At damage it stays: what is below it was damaged before, is still served as RocketMQ would,
    and is nothing that recovery may stop for later.
    """

    def __init__(self, store: MessageStore, verified_from: int, min_offset: Callable[[], int],
                 report: Report) -> None:
        """`min_offset` tells where the log begins now; `report` gets a sentence at the end of the work."""
        self.verified_from = verified_from if verified_from > min_offset() else 0
        self.blocked = BlockedReason(report)  # the damage, or why nothing can be read at present
        self._is_over = not self.verified_from
        self._store = store
        self._segment_bytes = store.segment_bytes
        self._min_offset = min_offset
        self._report = report
        self._at = -1  # the next record of the segment that is being read; -1 between two
        self._due_ns = 0

    def work(self) -> None:
        """Read a slice, if it is time: as long a pause follows as it took. Raises FlushError."""
        if self.pause_s() > 0:
            return
        began_ns = monotonic_ns()
        try:
            self._read()
        except FlushError:
            self._is_over = True
            raise
        except DiskError as error:
            self.blocked.set(str(error), f"what was there before this engine is not read: {error}; "
                                         f"trying again each {RETRY_NS / 1e9:g} s")
            self._due_ns = monotonic_ns() + RETRY_NS
        else:
            if not self._is_over:
                self.blocked.clear()
            self._due_ns = 2 * monotonic_ns() - began_ns

    def pause_s(self) -> float:
        """Until there is work; infinite when there is none any more."""
        return math.inf if self._is_over else max(0.0, (self._due_ns - monotonic_ns()) / 1e9)

    def _read(self) -> None:
        top = self.verified_from
        base = (top - 1) // self._segment_bytes * self._segment_bytes
        path = self._store.commit_log_segment(base)
        try:
            if self._is_deleted(base):
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
        elif not self._is_deleted(base):
            self._is_over = True
            damage = (
                f"the log is {why}, in what was there before this engine; everything from {top} on was read and is whole. "
                "Restore that segment from a copy and start again, or make a store without the damage: stop, then "
                "`pyengine salvage STORE DEST`")
            self.blocked.set(damage, damage, event=Event.LOG_DAMAGED)

    def _is_deleted(self, base: int) -> bool:
        """Whether the cleaner has taken the segment: its bytes read as zeros then. All that is left is read."""
        if base >= self._min_offset():
            return False
        self._move_to(base)
        return True

    def _move_to(self, base: int) -> None:
        self._at = -1
        self.verified_from = base if base > self._min_offset() else 0
        if not self.verified_from:
            self._is_over = True
            self._report(Event.OLD_LOG_READ, "the log that was there before this engine is read and whole: the watermark covers all of it")


def _sync_file(path: str, sync: Callable[[int, str], None]) -> None:
    """Open a file and `sync` it. FileNotFoundError; DiskError when it cannot be opened, FlushError when not synced."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise disk_error(error, "open", path) from error
    try:
        sync(descriptor, path)
    finally:
        os.close(descriptor)
