"""Dispatch records of the log to consume queues and index (DefaultMessageStore.doDispatch; docs/formats.md sections 8 and 10).

Invariants:
1. Entry k of a queue goes to byte 20 k; dispatching a range again does not change correct entries.
2. Everything below an offset that `dispatch` returned is dispatched: every entry and every key of the records below it
   is in the page cache. The caller publishes the offset afterwards, and after a crash continues from the published one.
3. An incomplete record is dispatched when it is complete; it is never skipped.
4. Each key is put once: the undo of an unfinished put is in `index_progress`, which survives this process if
   it is in shared memory, and the last entries of the index file tell which keys are already put.

Recovery uses it (inline, with private progress), and the reputter; there must be one Dispatcher per store at a time.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pyengine.arguments import Closing, is_folder_name
from pyengine.engine_config import EngineConfig, Geometry
from pyengine.formats.constants import CQ_ENTRY_BYTES, Readable
from pyengine.formats.delayed_message import parse_delay_levels
from pyengine.formats.paths import StorePaths, segment_name
from pyengine.native.dispatch import (
    BLANK,
    FAILED,
    NEEDS_EXT,
    NEEDS_FILE,
    NEEDS_INDEX,
    NEEDS_QUEUE,
    RANGE_END,
    WINDOW_BYTES,
    DispatchLoop,
    check_layout,
    progress_at,
    touched_queues,
)
from pyengine.native.flush import raise_disk_error
from pyengine.native.scan import REASONS, bounded
from pyengine.storage.consume_queue import (
    EMPTY,
    find_queue_end,
    open_ext_file,
    open_queue_file,
    settle_empty_queue,
    settle_ext_end,
)
from pyengine.storage.durable_writes import create_files
from pyengine.storage.index_file import IndexFiles

if TYPE_CHECKING:
    from pyengine._native import Array, CData, ms_ext_queue, ms_queue, ms_topic_stats

GAP = "gap"  # a reason to stop, in addition to those of native.scan
TOGETHER_MIN = 8    # least number of new queues whose first files are created together
TOGETHER_MAX = 256  # ... and most at a time: each is an open file
_OPEN_FILES_MIN = 16
_OPEN_FILES_MAX = 1 << 16
_UNREADABLE = "\ufffd"  # part of the decoded topic if it is not UTF-8
_QUEUE_OFFSET_MAX = (1 << 62) // CQ_ENTRY_BYTES


class QueueGap(NamedTuple):
    """A queue whose first message in the range has a higher queue offset than its next one.

    `max_physical` is the physical end of its last entry's message, -1 without one.
    """

    topic: str
    queue_id: int
    max_physical: int


class Dispatcher(Closing):
    """Writes the entries and keys of the log's records to consume queues and index.

    `index_progress` is the 256-byte area for the index undo: a cffi pointer or a
    writable buffer that survives this process, or None for private memory. After a kill of
    this process pass the same area to the next Dispatcher; zero it if the
    store was recovered without it. `open_files_max` is the most descriptors that are kept
    open (default: half of the process's limit, whose soft limit is raised). `gaps_above`: stop with GAP at a `gap` whose `max_physical`
    is higher.
    `loop` is the native loop, with its counters: a caller may run it itself, and calls dispatch() when it needs a queue or a file.
    `topic_stats` (native.store_stats, it must live longer than this object) counts new entries by topic.

    Raises StoreRefusedError for files of wrong lengths, DiskFullError, DiskError.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        geometry: Geometry,
        options: EngineConfig | None = None,
        *,
        index_progress: Readable | CData | None = None,
        open_files_max: int | None = None,
        gaps_above: int | None = None,
        topic_stats: ms_topic_stats | None = None,
    ) -> None:
        options = options or EngineConfig()
        self._paths = StorePaths(root)
        self._queues_folder = str(self._paths.consume_queue)
        self._file_bytes = geometry.mapped_file_size_consume_queue_bytes
        check_layout(self._file_bytes)
        self._ext_bytes = geometry.mapped_file_size_consume_queue_ext_bytes if options.enable_consume_queue_ext else 0
        self._open_files_max = max(_OPEN_FILES_MIN, open_files_max or _default_open_files())
        self._open_files = 0
        self._multi_dispatch = options.enable_multi_dispatch
        self._queues_known_to = -1  # the new queues are known up to this offset of the log
        self._begun: dict[tuple[str, int], int] = {}  # descriptors of queues whose first file was created before their first entry
        self._gaps_above = gaps_above
        self.gap: QueueGap | None = None
        progress = progress_at(index_progress)
        self._progress_memory = index_progress  # the memory of `progress`
        self.loop = DispatchLoop(
            self._file_bytes,
            parse_delay_levels(options.message_delay_level),
            progress,
            index_enabled=options.message_index_enable,
            multi_dispatch=options.enable_multi_dispatch,
            topic_stats=topic_stats,
        )
        if self._ext_bytes:
            self.loop.queues.use_ext(self._ext_bytes)
        self._index_files = IndexFiles(self._paths.index, geometry.index_layout)
        self.stopped_by = REASONS[RANGE_END]
        if options.message_index_enable:
            index, (self.loop.struct.indexed_offset, self.loop.struct.indexed_keys) = self._index_files.open_newest(progress)
            self.loop.use_index(index)

    def dispatch(self, view: Readable, base_offset: int, start: int, end: int) -> int:
        """Dispatch the complete records of [start, end) and return the offset after the last one.

        `view` is the mapping of one whole segment, whose first byte is at the
        physical offset `base_offset`. After a blank that ends below `end` the
        result is the start of the next segment. `stopped_by` then has the reason for the
        stop: `range_end` or `overrun` at an incomplete record, `blank`, or the damage
        of the record there (see native.scan.REASONS).

        Raises DiskFullError or DiskError with the path; a later call with the same
        `start` continues where this one failed.
        """
        with bounded(view, base_offset, start, end) as data:  # released even if this raises, since the caller unmaps
            return self._run(view, data, base_offset, start, end)

    def _run(self, view: Readable, data: Array[int], base_offset: int, start: int, end: int) -> int:
        loop, state = self.loop, self.loop.struct
        while True:
            reason = loop.run(data, base_offset, start, end)
            if reason == RANGE_END:
                self.stopped_by = "range_end"
                return state.reached
            if reason == NEEDS_FILE:
                self._attach_file(state.wanted_queue, state.wanted_queue_offset)
            elif reason == NEEDS_EXT:
                self._attach_ext(state.wanted_queue)
            elif reason == NEEDS_QUEUE:
                self._begin_queues(view, base_offset, state.reached, end)
                if not self._add_queue(loop.wanted_topic(), state.wanted_queue_id, state.wanted_queue_offset):
                    self.stopped_by = GAP
                    return state.reached
            elif reason == NEEDS_INDEX:
                loop.use_index(None)  # its mapping is about to be closed
                loop.use_index(self._index_files.make_next())
            elif reason == FAILED:
                self._raise_failed()
            else:
                self.stopped_by = REASONS[reason]
                segment_end = base_offset + len(data)
                return segment_end if reason == BLANK and end == segment_end else state.reached
            start = state.reached

    def close(self) -> None:
        """Close all files. No entry is lost: the kernel has all that were written."""
        for number in list(self.loop.queues.open_queues()):
            self._close_file(number)
        while self._begun:
            os.close(self._begun.popitem()[1])
        self.loop.use_index(None)
        self._index_files.close()

    def _begin_queues(self, view: Readable, base_offset: int, start: int, end: int) -> None:
        """Create the first files of the queues that begin in [start, end) together, if there are many.

        A queue that has a folder already may have entries, and is opened when it is needed.
        """
        wanted = _text(self.loop.wanted_topic()), self.loop.struct.wanted_queue_id
        if start < self._queues_known_to or wanted in self._begun or self._ext_bytes:
            return
        self._queues_known_to = end
        new = [(queue.topic, queue.queue_id)
               for queue in touched_queues(view, base_offset, start, end, multi_dispatch=self._multi_dispatch).queues
               if queue.min_queue_offset == 0 and is_queue_name(queue.topic.encode()) and _UNREADABLE not in queue.topic
               and not os.path.exists(f"{self._queues_folder}/{queue.topic}/{queue.queue_id}")]
        if len(new) < TOGETHER_MIN:
            return
        if self._open_files_max - self._open_files < min(len(new), TOGETHER_MAX):
            self._close_least_used()
        some, made = new[:max(0, min(TOGETHER_MAX, self._open_files_max - self._open_files))], None
        if len(some) >= TOGETHER_MIN:
            made = create_files([f"{self._queues_folder}/{topic}/{queue_id}/{segment_name(0)}" for topic, queue_id in some],
                                self._file_bytes, allocate=min(WINDOW_BYTES, self._file_bytes))
        if made is not None:
            self._begun.update(zip(some, made, strict=True))
            self._open_files += len(made)
            if len(some) < len(new):
                self._queues_known_to = start  # the next of the others that is needed looks again

    def _add_queue(self, topic: bytes, queue_id: int, queue_offset: int) -> bool:
        """Add the queue to the loop; False if it has a `gap`."""
        refused = not is_queue_name(topic) or not 0 <= queue_offset <= _QUEUE_OFFSET_MAX
        next_offset, max_physical = queue_offset, -1
        if not refused:
            folder = self._folder(topic, queue_id)
            is_begun = (_text(topic), queue_id) in self._begun
            if is_begun and queue_offset > 0:  # its first entry is not number 0: the file is created again, with filler before the entry
                os.close(self._begun.pop((_text(topic), queue_id)))
                self._open_files -= 1
                is_begun = False
            end = EMPTY if is_begun else find_queue_end(folder, self._file_bytes)
            if self._gaps_above is not None and queue_offset > end.next_offset and end.max_physical > self._gaps_above:
                self.gap = QueueGap(_text(topic), queue_id, end.max_physical)
                return False
            if end.max_physical >= 0:
                next_offset, max_physical = end
            elif not is_begun:
                settle_empty_queue(folder, self._file_bytes)
        queue = self.loop.queues[self.loop.queues.add(topic, queue_id)]
        queue.next_offset = next_offset
        queue.max_physical = max_physical
        queue.refused = refused
        return True

    def _attach_file(self, number: int, position: int) -> None:
        self._close_file(number)
        queue, topic = self.loop.queues[number], self.loop.queues.topic(number)
        begun = self._begun.pop((_text(topic), queue.queue_id), -1)
        if begun >= 0 and position * CQ_ENTRY_BYTES < self._file_bytes:
            queue.fd, queue.file_start, queue.allocated_bytes = begun, 0, min(WINDOW_BYTES, self._file_bytes)
            return
        if begun >= 0:
            self._open_files -= 1
            os.close(begun)
        if self._open_files >= self._open_files_max:
            self._close_least_used()
        folder = self._folder(topic, queue.queue_id)
        fd, start, allocated = open_queue_file(folder, self._file_bytes, position)
        queue.fd, queue.file_start, queue.allocated_bytes = fd, start, allocated
        self._open_files += 1

    def _attach_ext(self, number: int) -> None:
        ext = self.loop.queues.ext(number)
        self._close_descriptor(ext)
        if self._open_files >= self._open_files_max:
            self._close_least_used()
        topic, queue_id = self.loop.queues.topic(number), self.loop.queues[number].queue_id
        folder = self._paths.queue_ext_folder(_text(topic), queue_id)
        if ext.end < 0:
            ext.end = settle_ext_end(self._folder(topic, queue_id), folder, self._file_bytes, self._ext_bytes)
        ext.fd, ext.file_start, ext.allocated_bytes = open_ext_file(folder, self._ext_bytes, ext.end)
        self._open_files += 1

    def _close_file(self, number: int) -> None:
        if self._ext_bytes:
            self._close_descriptor(self.loop.queues.ext(number))
        self._close_descriptor(self.loop.queues[number])

    def _close_descriptor(self, file: ms_queue | ms_ext_queue) -> None:
        if file.fd >= 0:
            fd, file.fd = file.fd, -1
            self._open_files -= 1
            os.close(fd)

    def _close_least_used(self) -> None:
        """Close the least used quarter of the files: the search for them costs little per file then."""
        queues = self.loop.queues
        by_age = sorted(queues.open_queues(), key=lambda number: queues[number].last_used)
        for number in by_age[: max(1, len(by_age) // 4)]:
            self._close_file(number)

    def _folder(self, topic: bytes, queue_id: int) -> Path:
        return self._paths.queue_folder(_text(topic), queue_id)

    def _raise_failed(self) -> None:
        state = self.loop.struct
        queues = self.loop.queues
        number = state.queues.failed_queue
        if number < 0:
            raise_disk_error(-state.error_number, "write index", str(self._paths.index))
        folder = self._folder(queues.topic(number), queues[number].queue_id)
        raise_disk_error(-state.error_number, "write queue", str(folder))


def is_queue_name(topic: bytes) -> bool:
    """Whether a folder can have this topic's name.

    Puts to other topics are refused, but another program's log may have them: their messages are indexed and get no queue.
    """
    try:
        return is_folder_name(topic.decode("utf-8"))
    except UnicodeDecodeError:
        return False


def _text(topic: bytes) -> str:
    return topic.decode("utf-8", "replace")


def _default_open_files() -> int:
    """Raise the process's soft limit of open files to the hard one, and return half of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return min(soft, _OPEN_FILES_MAX) // 2 if soft != resource.RLIM_INFINITY else _OPEN_FILES_MAX // 2
