"""CleanCommitLogService and CleanConsumeQueueService: decide which files are deleted (docs/cleaning.md), and delete them in paced steps.

The log is deleted one segment at a time, always the oldest: new holds are refused, the service waits for current holders, removes the
name (durably), moves `min`, and frees the blocks in steps. Files of queues, extensions and index are deleted after the log: when the
log's start has moved since the last complete pass, and once at start, in case a killed cleaner left some. The minimum offset of a queue
is not stored: readers compute it from the entries and the log's start at each call.

Both services are run step by step: `steps()` yields the seconds to pause. After a kill at any point the log begins at the same segment
as before or at the next one, and is complete. The shared object has `removing_end`, by which the next incarnation finds a segment whose
deletion had begun, and the time since when that is held.

A file of queues or index is deleted when all of its messages are below the log's first byte, but never the last file, which has the
position of the next entry. The rules are RocketMQ's:

    a queue's file       the record of its last entry is below it  (MappedFileQueue.deleteExpiredFileByOffset)
    an extension file    the queue's first valid entry points after it (ConsumeQueueExt.truncateByMinAddress)
    an index file        the record of its last key is below it    (IndexService.deleteExpiredFile)

`decide` and the functions next to it do no I/O and read no clock: both are arguments.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pyengine.engine_config import delete_hours
from pyengine.errors import disk_errors
from pyengine.events import Event, Report
from pyengine.formats.constants import CQ_ENTRY_BYTES, INDEX_HEADER_BYTES
from pyengine.formats.consume_queue import ENTRY, decode_ext_address, is_ext_address, is_filler, is_live
from pyengine.formats.index_file import unpack_header
from pyengine.formats.paths import parse_segment_name, segment_name
from pyengine.ipc.cleaning import UNSEEN
from pyengine.ipc.control_block import now_ms
from pyengine.native import control as native
from pyengine.native.control import REFUSE_DISK_FULL, REFUSE_UNWRITABLE
from pyengine.native.failpoints import failpoint
from pyengine.native.flush import monotonic_ns
from pyengine.services.service import BlockedReason
from pyengine.storage.commit_log import note_log_begin
from pyengine.storage.config import EngineConfig
from pyengine.storage.durable_writes import free_blocks, unlink_durably
from pyengine.storage.file_system import DiskUse
from pyengine.storage.log_holds import lowest_log_hold
from pyengine.storage.mapped_file import index_file_names, is_plain_file, queue_folders
from pyengine.storage.message_store import MessageStore

if TYPE_CHECKING:
    from pyengine._native import ms_cleaning, ms_control

HOUR_MS = 3_600_000
QUEUES_A_STEP = 64  # queues checked between two pauses
_CHUNK_BYTES = 3276 * CQ_ENTRY_BYTES


class CleanRequest(NamedTuple):
    """A request by hand. `reserved_ms` None: the setting's age; `used_percent` 0: by age only."""

    reserved_ms: int | None = None
    used_percent: int = 0


class Decision(NamedTuple):
    """What may be deleted now, and the reason: "" for nothing, else "hand", "space", "size" or "time"."""

    why: str = ""
    reserved_ms: int = 0
    at_once: bool = False     # of any age
    batch_max: int | None = None
    age_counts: bool = False  # for "size": whether age alone would also delete now


NOTHING = Decision()


def decide(config: EngineConfig, uses: Sequence[DiskUse], hour: int, request: CleanRequest | None = None, log_bytes: int = 0) -> Decision:
    """Return the decision of the first rule that applies.

    `uses`: those of the file systems of log and queues; `hour`: 0..23, local time; `log_bytes`: the length of the log.
    """
    reserved_ms = config.file_reserved_time_hours * HOUR_MS
    if request is not None:
        if request.reserved_ms is not None:
            reserved_ms = request.reserved_ms
        if not request.used_percent:
            return Decision("hand", reserved_ms)
        if any(use.used_percent > request.used_percent for use in uses):
            return Decision("hand", reserved_ms, at_once=True)
        return NOTHING
    by_age, batch_max = NOTHING, config.delete_files_batch_max
    if any(use.used_percent > config.disk_max_used_space_ratio for use in uses):
        by_age = Decision("space", reserved_ms, batch_max=batch_max)
    elif hour in delete_hours(config.delete_when):
        by_age = Decision("time", reserved_ms, batch_max=batch_max)
    if config.clean_file_forcibly_enable and any(_is_beyond(config, use, config.disk_space_clean_forcibly_ratio) for use in uses):
        return Decision("space", reserved_ms, at_once=True, batch_max=batch_max)
    if config.log_retention_bytes and log_bytes > config.log_retention_bytes:
        return Decision("size", reserved_ms, at_once=True, batch_max=batch_max, age_counts=bool(by_age.why))
    return by_age


def refusal(config: EngineConfig, uses: Sequence[DiskUse]) -> tuple[int, str]:
    """Return (REFUSE_ bits, a sentence with the cause and what to do); (0, "") if puts are accepted."""
    for use in uses:
        if use.unwritable_reason:
            return REFUSE_UNWRITABLE, (f"{use.unwritable_reason}: make it writable; puts are accepted again by themselves")
    for use in uses:
        if not use.inodes_left:
            return REFUSE_DISK_FULL, (f"the file system of {use.folder} has no inode left: delete files there; puts are "
                                      "accepted again by themselves")
        if _is_beyond(config, use, config.disk_space_warning_level_ratio):
            return REFUSE_DISK_FULL, (
                f"the disk of {use.folder} is {use.used_percent} % used, over disk_space_warning_level_ratio = "
                f"{config.disk_space_warning_level_ratio}: free space or run `pyengine clean`; puts are accepted again by themselves")
    return 0, ""


def _is_beyond(config: EngineConfig, use: DiskUse, percent: int) -> bool:
    return use.used_percent > percent and not 0 < config.disk_space_enough_bytes <= use.usable_bytes


def deletable_end(segment_bytes: int, wrote: int, *others: int) -> int:
    """Return the offset at or below which a segment must end to be deleted: below the last one with data, and below all `others`.

    `others` are the positions from which the log is still needed: committed, flushed, reput_from, and
    the offset up to which the checkpointer has synced the queues.
    """
    last = max(0, wrote - 1)
    return max(0, min(last - last % segment_bytes, *others))


def next_to_delete(
    segments: Sequence[tuple[int, int]], segment_bytes: int, end: int, decision: Decision, now_ms: int, removing_end: int = 0
) -> int | None:
    """Return the start of the segment to delete next, None if there is none: always the oldest, as in RocketMQ.

    `segments`: (start, modification time in ms), ascending. The segment that ends at
    `removing_end` was held when it should have been deleted, and is deleted whatever the decision; any
    other value of it is ignored.
    """
    if not segments:
        return None
    start, modified_ms = segments[0]
    if start + segment_bytes > end:
        return None
    if start + segment_bytes == removing_end:
        return start
    if not decision.why:
        return None
    return start if decision.at_once or now_ms >= modified_ms + decision.reserved_ms else None


def expired_queue_files(folder: Path, size_bytes: int, log_min: int) -> list[Path]:
    """Return the queue's files to delete, oldest first."""
    expired = []
    for start in _starts(folder)[:-1]:
        path = folder / segment_name(start)
        data = _read(path, size_bytes - CQ_ENTRY_BYTES, CQ_ENTRY_BYTES)
        if len(data) < CQ_ENTRY_BYTES:
            break
        entry = ENTRY.unpack(data)
        if not is_live(entry) or (not is_filler(entry) and entry[0] >= log_min):
            break
        expired.append(path)
    return expired


def expired_ext_files(folder: Path, ext_folder: Path, ext_size_bytes: int, log_min: int) -> list[Path]:
    """Return the extension files of a queue to delete, oldest first, after the queue's own files were deleted."""
    ext_starts = _starts(ext_folder)
    if len(ext_starts) < 2:
        return []
    tags_code = _first_living_tags_code(folder, log_min)
    if tags_code is None or not is_ext_address(tags_code):
        return []
    first_used = decode_ext_address(tags_code)
    return [ext_folder / segment_name(start) for start in ext_starts[:-1] if start + ext_size_bytes < first_used]


def expired_index_files(folder: Path, log_min: int) -> list[Path]:
    """Return the index files to delete, oldest first."""
    expired = []
    for name in index_file_names(folder)[:-1]:
        data = _read(folder / name, 0, INDEX_HEADER_BYTES)
        if len(data) < INDEX_HEADER_BYTES or unpack_header(data).end_physical_offset >= log_min:
            break
        expired.append(folder / name)
    return expired


def _first_living_tags_code(folder: Path, log_min: int) -> int | None:
    """Return the tags code of the first entry whose record is still in the log; it reads the first file, as RocketMQ does."""
    starts = _starts(folder)
    if not starts:
        return None
    path, at = folder / segment_name(starts[0]), 0
    while chunk := _read(path, at, _CHUNK_BYTES):
        for entry in ENTRY.iter_unpack(chunk[: len(chunk) // CQ_ENTRY_BYTES * CQ_ENTRY_BYTES]):
            if not is_live(entry):
                return None
            if entry[0] >= log_min and not is_filler(entry):
                return int(entry[2])
        at += len(chunk)
    return None


def _read(path: Path, at: int, length: int) -> bytes:
    """Return up to `length` bytes, none if there is no such file."""
    with disk_errors("read", path), contextlib.suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), length, at)
    return b""


def _starts(folder: Path) -> list[int]:
    with disk_errors("list", folder), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(start for name in os.listdir(folder) if (start := parse_segment_name(name)) is not None)
    return []


def hour() -> int:
    """Return the hour of the day in the local time zone, 0..23."""
    return time.localtime().tm_hour


class CleanCommitLogService:
    """Deletes segments of one store: that of a running engine, or a stopped one with structs in private memory."""

    def __init__(self, control: ms_control, shared: ms_cleaning, store: MessageStore, config: EngineConfig,
                 holders: Callable[[int], list[int]], report: Report = lambda event, text: None) -> None:
        """`control` and `shared`: `struct ms_control *` and `struct ms_cleaning *`; `holders`: Cleaning.holders."""
        self._control = control
        self._cleaning = shared
        self._store = store
        self._segment_bytes = store.segment_bytes
        self._holders = holders
        self._report = report
        self.take_settings(config)
        self._retried_ns = -self._retry_ns
        self._held = BlockedReason(report)
        self.publish_min()

    def take_settings(self, config: EngineConfig) -> None:
        """Take the pauses, from the next step on."""
        self._pause_s = config.delete_commit_log_files_interval_ms / 1000
        self._forcibly_ns = config.destroy_mapped_file_interval_forcibly_ms * 1_000_000
        self._retry_ns = config.redelete_hanged_file_interval_ms * 1_000_000

    def log_bytes(self) -> int:
        """Return the length of the log."""
        return native.load_position(self._control.wrote) - native.load_position(self._control.min_offset)

    def publish_min(self) -> int:
        """Set `min` to the current start of the log; it never decreases."""
        starts = [start for start, _ in self.segments()]
        if starts and starts[0] > native.load_position(self._control.min_offset):
            native.store_position(self._control.min_offset, starts[0])
        return native.load_position(self._control.min_offset)

    def steps(self, decide: Callable[[], Decision]) -> Iterator[float]:
        """Run one round. `decide` is called again before each segment, since each deletion frees space."""
        deleted, paused_for = 0, -1
        while True:
            decision = decide()
            segment = self._next(decision)
            if segment is None or (decision.batch_max is not None and deleted >= decision.batch_max):
                return
            if deleted and paused_for != segment:
                paused_for = segment
                yield self._pause_s
                continue  # a segment may be held now, and the disk may have space again
            if not self._is_released(segment, decision):
                return
            yield from self._delete(segment)
            deleted += 1

    def _next(self, decision: Decision) -> int | None:
        removing_end = native.load(self._cleaning, "removing_end")
        if not decision.why and monotonic_ns() - self._retried_ns < self._retry_ns:
            removing_end = 0  # a segment that was held has its own, longer interval
        end, wall_ms = self._deletable_end(), now_ms()
        segment = next_to_delete(self.segments(), self._segment_bytes, end, decision, wall_ms, removing_end)
        if segment is None:
            return None
        is_disk_full = decision.why == "space" and decision.at_once
        hold = None if is_disk_full else lowest_log_hold(self._store.root, wall_ms)
        if hold is not None and segment + self._segment_bytes > hold.offset:
            self._report_once(f"segment {segment_name(segment)} should be deleted, but the log hold {hold.name} of {hold.owner} keeps "
                              f"it, for {(hold.expires_ms - wall_ms) / 1000:.0f} s more unless it is renewed")
            return None
        if segment + self._segment_bytes == removing_end:
            self._retried_ns = monotonic_ns()
        return segment

    def _deletable_end(self) -> int:
        control = self._control
        wrote, _ = native.committed_slot(control)
        wrote = min(wrote, native.load_position(control.wrote))
        needed = [native.load_position(position) for position in (control.committed, control.flushed, control.reput_from)]
        return deletable_end(self._segment_bytes, wrote, *needed, native.load(control.workers[native.CHECKPOINTER], "position"))

    def segments(self) -> list[tuple[int, int]]:
        """Return (start, modification time in ms) of all segments, ascending."""
        found = []
        for folder in self._store.commit_log_folders.all:
            with disk_errors("list", folder), contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    start = parse_segment_name(entry.name)
                    if start is not None and is_plain_file(entry):
                        with contextlib.suppress(FileNotFoundError):  # the allocator removes unused segments at a stop
                            found.append((start, entry.stat().st_mtime_ns // 1_000_000))
        return sorted(found)

    def _is_released(self, segment: int, decision: Decision) -> bool:
        """Whether no process holds the segment, or its holds have lasted too long."""
        line = self._cleaning
        end = segment + self._segment_bytes
        if native.load(line, "removing_end") < end:
            if decision.why == "size" and not self._is_old(segment, decision) and (held_by := self._holders(end)):
                # It is not old enough for a deletion by age: it is kept for its holders.
                native.increment(line, "waited_for_holds")
                self._report_once(f"the log is over log_retention_bytes, but {_names(held_by)} holds its oldest segment "
                                  f"{segment_name(segment)}: it stays until the hold is released or expires")
                return False
            native.store(line, "removing_since_ns", 0)
            failpoint("segment_chosen")
            native.store(line, "removing_end", end)
            failpoint("removing_end_moved")
        held_by = self._holders(end)
        if not held_by:
            return True
        now_ns = monotonic_ns()
        since_ns = native.load(line, "removing_since_ns")
        if not since_ns:
            since_ns = now_ns
            native.store(line, "removing_since_ns", now_ns)
        if now_ns - since_ns >= self._forcibly_ns:
            native.increment(line, "forced_holds")
            self._report(Event.SEGMENT_FORCED, f"segment {segment_name(segment)} is deleted although {_names(held_by)} held it for "
                         f"{(now_ns - since_ns) / 1e9:.0f} s")
            return True
        native.increment(line, "waited_for_holds")
        self._report_once(f"segment {segment_name(segment)} should be deleted, but {_names(held_by)} holds it: tried again, and "
                       f"forced after {self._forcibly_ns / 1e9:g} s")
        return False

    def _is_old(self, segment: int, decision: Decision) -> bool:
        """Whether age alone would delete the segment now."""
        modified_ms = dict(self.segments()).get(segment)
        return decision.age_counts and modified_ms is not None and now_ms() >= modified_ms + decision.reserved_ms

    def _delete(self, segment: int) -> Iterator[float]:
        line, end = self._cleaning, segment + self._segment_bytes
        note_log_begin(self._store.root, end)
        failpoint("segment_released")
        descriptor = unlink_durably(self._store.commit_log_segment(segment))
        failpoint("segment_removed")
        native.store_position(self._control.min_offset, end)
        failpoint("min_moved")
        native.store(line, "removing_since_ns", 0)
        native.increment(line, "removed_segments")
        failpoint("removal_half_counted")
        native.increment(line, "removed_bytes", self._segment_bytes)
        failpoint("removal_counted")
        self._held.clear()
        yield from free_blocks(descriptor)

    def _report_once(self, text: str) -> None:
        self._held.set(text, text, event=Event.SEGMENT_HELD)


def _names(pids: list[int]) -> str:
    return ", ".join("a process of another container" if pid == UNSEEN else f"process {pid}" for pid in dict.fromkeys(pids))


class CleanConsumeQueueService:
    """Deletes queue and index files whose messages are deleted."""

    def __init__(self, shared: ms_cleaning, store: MessageStore, config: EngineConfig) -> None:
        self._cleaning = shared
        self._store = store
        self._geometry = config.geometry
        self.take_settings(config)
        self._done_to = 0

    def take_settings(self, config: EngineConfig) -> None:
        """Take the pause, from the next step on."""
        self._pause_s = config.delete_consume_queue_files_interval_ms / 1000

    def steps(self, log_min: int) -> Iterator[float]:
        """Run one pass, if the log's start has moved; yield the seconds to pause."""
        if log_min <= self._done_to:
            return
        for number, (topic, queue_id, folder) in enumerate(queue_folders(self._store.consume_queue)):
            expired = expired_queue_files(folder, self._geometry.mapped_file_size_consume_queue_bytes, log_min)
            for path in expired:
                yield from self._delete(path, "removed_queue_files")
            ext_folder = self._store.queue_ext_folder(topic, queue_id)
            for path in expired_ext_files(folder, ext_folder, self._geometry.mapped_file_size_consume_queue_ext_bytes, log_min):
                expired.append(path)
                yield from self._delete(path, "removed_queue_files")
            if expired:
                yield self._pause_s
            elif number % QUEUES_A_STEP == 0:
                yield 0.0
        for path in expired_index_files(self._store.index, log_min):
            yield from self._delete(path, "removed_index_files")
        self._done_to = log_min

    def _delete(self, path: Path, counter: str) -> Iterator[float]:
        descriptor = unlink_durably(path)
        failpoint("derived_file_removed")
        native.increment(self._cleaning, counter)
        yield from free_blocks(descriptor)
