"""CleanCommitLogService and CleanConsumeQueueService: delete files, paced, and never one that is still needed.

Of the log one segment at a time, always the oldest: new readers are refused, current holders are waited for,
the name is removed (durably), `min` moves, its blocks are freed in steps. Queues, their extensions and the
index follow the log: only when the log's beginning has moved since the last complete pass, and
once at start, for what a killed predecessor left. The minimum offset of a queue needs no correction
here: readers work it out from the entries and the log's beginning, at each look.

Both services are driven step by step: `steps()` yields the seconds to pause. Killed anywhere: the log
begins at an earlier or at the next segment, and is whole. The next incarnation finds a segment whose
turn had come below `removing_end`, and since when it is held, in the shared object.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyengine.events import Event, Report
from pyengine.formats.paths import parse_segment_name, segment_name
from pyengine.ipc.cleaning import holders
from pyengine.native import cleaning as native_cleaning
from pyengine.native import control as native
from pyengine.native.failpoint import failpoint
from pyengine.native.flush import monotonic_ns
from pyengine.services.retention.clean_rules import Decision, deletable_end, next_to_go
from pyengine.storage.config import EngineConfig
from pyengine.storage.durable_writes import give_back, unlink_durably
from pyengine.storage.expired_files import expired_ext_files, expired_index_files, expired_queue_files, queue_folders
from pyengine.storage.log_holds import lowest_log_hold
from pyengine.storage.mapped_file import is_plain_file
from pyengine.storage.message_store import MessageStore

if TYPE_CHECKING:
    from pyengine._native import ms_cleaning, ms_control

QUEUES_A_STEP = 64  # looked at without a pause in between


class CleaningClock:
    """The clocks that retention depends on, in one place, so that tests can set them."""

    def now_ms(self) -> int:
        """Wall clock, against the files' modification times."""
        return time.time_ns() // 1_000_000

    def hour(self) -> int:
        """Hour of the day in the local time zone, 0..23."""
        return time.localtime().tm_hour

    def monotonic_ns(self) -> int:
        """For pauses and waits."""
        return monotonic_ns()


@dataclass(frozen=True)
class CleanedStore:
    """What is cleaned, and by which clock: the running engine's store, or a stopped one with structs of this process.

    `control` and `shared`: `struct ms_control *` and `struct ms_cleaning *`.
    """

    control: ms_control
    shared: ms_cleaning
    store: MessageStore
    config: EngineConfig
    clock: CleaningClock
    report: Report = lambda event, text: None


class CleanCommitLogService:
    """Deletes segments of one store."""

    def __init__(self, cleaned: CleanedStore) -> None:
        config = cleaned.config
        self._control = cleaned.control
        self._cleaning = cleaned.shared
        self._store = cleaned.store
        self._segment_bytes = cleaned.store.segment_bytes
        self._clock = cleaned.clock
        self._report = cleaned.report
        self.take_settings(config)
        self._retried_ns = -self._retry_ns
        self._said = ""
        self.publish_min()

    def take_settings(self, config: EngineConfig) -> None:
        """Its pauses, from the next step on."""
        self._pause_s = config.delete_commit_log_files_interval_ms / 1000
        self._forcibly_ns = config.destroy_mapped_file_interval_forcibly_ms * 1_000_000
        self._retry_ns = config.redelete_hanged_file_interval_ms * 1_000_000

    def log_bytes(self) -> int:
        """From the log's beginning to its end."""
        return native.load_position(self._control.wrote) - native.load_position(self._control.min_offset)

    def publish_min(self) -> int:
        """Let `min` be where the log begins now; it never moves back."""
        starts = [start for start, _ in self._segments()]
        if starts and starts[0] > native.load_position(self._control.min_offset):
            native.store_position(self._control.min_offset, starts[0])
        return native.load_position(self._control.min_offset)

    def steps(self, decide: Callable[[], Decision]) -> Iterator[float]:
        """One round. `decide` is asked again before each segment, since each deletion makes room."""
        deleted, paused_for = 0, -1
        while True:
            decision = decide()
            segment = self._next(decision)
            if segment is None or (decision.batch_max is not None and deleted >= decision.batch_max):
                return
            if deleted and paused_for != segment:
                paused_for = segment
                yield self._pause_s
                continue  # a hold may have come meanwhile, and the disk may have room again
            if not self._is_released(segment, decision):
                return
            yield from self._delete(segment)
            deleted += 1

    def _next(self, decision: Decision) -> int | None:
        removing_end = native.load(self._cleaning, "removing_end")
        if not decision.why and self._clock.monotonic_ns() - self._retried_ns < self._retry_ns:
            removing_end = 0  # a segment that was held has its own, longer interval
        end, now_ms = self._deletable_end(), self._clock.now_ms()
        segment = next_to_go(self._segments(), self._segment_bytes, end, decision, now_ms, removing_end)
        hold = None if segment is None or decision.passes_log_holds else lowest_log_hold(self._store.root, now_ms)
        if segment is not None and hold is not None and segment + self._segment_bytes > hold.offset:
            self._report_once(f"segment {segment_name(segment)} should be deleted, but the log hold {hold.name} of {hold.owner} keeps "
                              f"it, for {(hold.expires_ms - now_ms) / 1000:.0f} s more unless it is renewed")
            return None
        if segment is not None and segment + self._segment_bytes == removing_end:
            self._retried_ns = self._clock.monotonic_ns()
        return segment

    def _deletable_end(self) -> int:
        control = self._control
        wrote, _ = native.committed_slot(control)
        wrote = min(wrote, native.load_position(control.wrote))
        needed = [native.load_position(position) for position in (control.committed, control.flushed, control.reput_from)]
        return deletable_end(self._segment_bytes, wrote, *needed, native.load(control.workers[native.CHECKPOINTER], "position"))

    def _segments(self) -> list[tuple[int, int]]:
        """(start, modification time in ms), ascending."""
        found = []
        for folder in self._store.commit_log_folders.all:
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    start = parse_segment_name(entry.name)
                    if start is not None and is_plain_file(entry):
                        found.append((start, entry.stat().st_mtime_ns // 1_000_000))
        return sorted(found)

    def _is_released(self, segment: int, decision: Decision) -> bool:
        """Whether no process holds the segment, or its holders have had it for too long."""
        line = self._cleaning
        end = segment + self._segment_bytes
        if native.load(line, "removing_end") < end:
            if decision.why == "size" and not self._is_old(segment, decision) and (held_by := holders(line, end)):
                # By age its turn has not come: it stays whole for them.
                native.increment(line, "waited_for_holds")
                self._report_once(f"the log is over log_retention_bytes, but {_names(held_by)} holds its oldest segment "
                                  f"{segment_name(segment)}: it stays until that is given back, or its time is over")
                return False
            native.store(line, "removing_since_ns", 0)
            failpoint("segment_chosen")
            native_cleaning.shut(line, end)
        held_by = holders(line, end)
        if not held_by:
            return True
        now_ns = self._clock.monotonic_ns()
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
        modified_ms = dict(self._segments()).get(segment)
        return decision.age_counts and modified_ms is not None and self._clock.now_ms() >= modified_ms + decision.reserved_ms

    def _delete(self, segment: int) -> Iterator[float]:
        line, end = self._cleaning, segment + self._segment_bytes
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
        self._said = ""
        yield from give_back(descriptor)

    def _report_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._report(Event.SEGMENT_HELD, text)


def _names(pids: list[int]) -> str:
    return ", ".join(f"process {pid}" for pid in dict.fromkeys(pids))


class CleanConsumeQueueService:
    """Deletes queue and index files whose messages are gone."""

    def __init__(self, cleaned: CleanedStore) -> None:
        config = cleaned.config
        self._cleaning = cleaned.shared
        self._store = cleaned.store
        self._geometry = config.geometry
        self.take_settings(config)
        self._done_to = 0

    def take_settings(self, config: EngineConfig) -> None:
        """Its pause, from the next step on."""
        self._pause_s = config.delete_consume_queue_files_interval_ms / 1000

    def steps(self, log_min: int) -> Iterator[float]:
        """One pass, if the log's beginning has moved; yields the seconds to pause."""
        if log_min <= self._done_to:
            return
        for number, (topic, queue_id, folder) in enumerate(queue_folders(self._store)):
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
        yield from give_back(descriptor)
