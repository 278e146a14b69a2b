"""Rebuild queues and index from the log alone (`pyengine rebuild`).

RocketMQ can rebuild only all queues at once, after they were deleted; it does not repair a single
queue that is missing or wrong. Here any queue, or the index, is moved to
`quarantine/rebuild-N/` and rebuilt.

    survey     reads the log, and refuses damage below pyengine's watermark; changes nothing
    markers    config/recovery: the whole log must be dispatched; config/rebuild: the pieces to
               move, and where to
    recovery   moves queues and index away by rename, then dispatches as usual: it writes missing
               entries and keeps correct ones; then it restores the times of files

After a kill at any point run it again, or just start the store: both continue from the markers.
A queue without messages in the log cannot be rebuilt. It is not moved, because its end has
the next queue offset.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pyengine.errors import ExitCode, InvariantError, NotAStoreError, UsageError, disk_errors
from pyengine.formats.index_file import IndexHeader, IndexLayout
from pyengine.formats.paths import segment_name
from pyengine.formats.record import decode_record
from pyengine.native.dispatch import (
    NEEDS_INDEX,
    NEEDS_QUEUE,
    RANGE_END,
    DispatchLoop,
    IndexFile,
    TouchedQueue,
    new_progress,
    touched_queues,
)
from pyengine.native.scan import bounded, count_keys, sync, walk
from pyengine.storage.checkpoint import (
    RebuildMarker,
    RecoveryMarker,
    RecoveryPath,
    read_marker,
    read_rebuild_marker,
    write_marker,
    write_rebuild_marker,
)
from pyengine.storage.dispatcher import Dispatcher, DispatchOptions, is_queue_name
from pyengine.storage.durable_writes import FILE_MODE, sync_file
from pyengine.storage.index_file import map_index_file
from pyengine.storage.log_scan import LogView, own_watermark, scan_log
from pyengine.storage.mapped_file import MappedFile, list_segments, mapped, queue_folders, refuse_file
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.log import Work
from pyengine.storage.recovery.recover import recover
from pyengine.storage.recovery.report import (
    GrowingProgress,
    OnStep,
    Progress,
    RecoveryOptions,
    RecoveryReport,
    RecoveryState,
    SharedState,
)

_SURVEY_BYTES = 4 << 20
Queue = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Selection:
    """What to rebuild: all queues, those of one topic or a single one, and the index."""

    queues: bool = True
    index: bool = True
    topic: str | None = None
    queue_id: int | None = None

    def __post_init__(self) -> None:
        if self.queue_id is not None and self.topic is None:
            raise UsageError("a queue id needs its topic")
        if not self.queues and not self.index:
            raise UsageError("neither queues nor index are selected: there is nothing to rebuild")

    def wants(self, queue: Queue) -> bool:
        return self.queues and self.topic in (None, queue[0]) and self.queue_id in (None, queue[1])


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """The outcome of a rebuild. `state` degraded: the log is damaged below its durable end, and nothing was changed."""

    state: RecoveryState
    exit_code: ExitCode
    queues: tuple[Queue, ...] = ()       # rebuilt from the log
    kept: tuple[Queue, ...] = ()         # selected, but without messages in the log: not changed
    index: bool = False
    replaced: tuple[str, ...] = ()       # the moved pieces, as paths relative to the root
    quarantine: str = ""                 # where they were moved to; "" if there were none
    end_offset: int = 0
    log_bytes: int = 0                   # dispatched
    damage_offset: int | None = None
    recovery: RecoveryReport | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def sentence(self) -> str:
        """The outcome for a person, one sentence."""
        if self.state is RecoveryState.DEGRADED:
            return (f"The log is damaged at offset {self.damage_offset}, in bytes that had been synced: queues rebuilt from it "
                    "would lack messages. Nothing was changed; restore the segment, `salvage`, or `recover --accept-loss`.")
        queues = "1 queue" if len(self.queues) == 1 else f"{len(self.queues)} queues"
        made = [queues] * bool(self.queues) + ["the index"] * self.index
        what = " and ".join(made) or "nothing"
        return f"Rebuilt {what} from {self.log_bytes} bytes of log" + (
            f"; the replaced files are in {self.quarantine}." if self.quarantine else ".")

    def to_dict(self) -> dict[str, Any]:
        """For --json: plain values."""
        fields = asdict(replace(self, recovery=None))
        del fields["recovery"]
        for name in ("queues", "kept"):
            fields[name] = [{"topic": topic, "queueId": queue_id} for topic, queue_id in fields[name]]
        return {**fields, "exit_code": int(self.exit_code), "sentence": self.sentence}


@dataclass(slots=True)
class Survey:
    """The state of the store before the rebuild: its log, and the queues that have messages in it."""

    log: LogView
    in_log: set[Queue] = field(default_factory=set)
    damage_offset: int | None = None  # below the durable end


class RebuildWork:
    """The work of a rebuild that can be replaced: reading the log and writing queues and index, here by recovery's dispatch.

    A caller with more processes or hosts (pyengine.spark.store_rebuild) does this work in
    another way; markers, moves and the other steps of recovery stay the same.
    """

    note = ""        # why the other way could not be used
    made_bytes = 0   # bytes of the log that the other way has dispatched

    def survey(self, store: MessageStore, options: RecoveryOptions, log: LogView, progress: Progress) -> Survey:
        """Read the log: find its queues and, in pyengine's own store, damage below its durable end."""
        survey = Survey(log)
        if log.watermark is not None:
            scan = scan_log(log, 0, check_crc=options.check_crc_on_recover, limit=log.watermark)
            if scan.end_offset < log.watermark:
                survey.damage_offset = scan.end_offset
                return survey
        _survey_queues(survey, progress)
        return survey

    def make(
        self, store: MessageStore, options: RecoveryOptions, made: Collection[Queue], marker: RebuildMarker
    ) -> int | None:
        """Move the pieces of `marker` and rebuild them, durably; return up to which offset of the log. None: recovery must do it."""
        return None

    def dispatch(self, work: Work, log: LogView, start: int, end: int) -> bool:
        """Write queues and index of the log as recovery has left it, if `make` did not; see DispatchElsewhere."""
        return False


def rebuild(
    store: MessageStore,
    selection: Selection | None = None,
    *,
    options: RecoveryOptions | None = None,
    shared: SharedState | None = None,
    progress: Progress | None = None,
    on_step: OnStep | None = None,
    work: RebuildWork | None = None,
) -> RebuildReport:
    """Rebuild queues and index of the stopped store from its log; the caller owns the store.

    Afterwards the store is like one that was stopped in order. Raises NotAStoreError, UsageError (there is
    no such queue), StoreRefusedError (a file that is not replaced, or a segment, has a
    wrong length), CorruptionError (a segment is missing), DiskFullError, DiskError.
    """
    started_s = time.monotonic()
    selection, on_step = selection or Selection(), on_step or (lambda name: None)
    # Records with light queue offsets got them from a store with multi-dispatch, even if the settings differ now.
    options = replace(options or RecoveryOptions(), enable_multi_dispatch=True)
    if store.consume_queue_ext.is_dir():
        options = replace(options, enable_consume_queue_ext=True)
    steps = GrowingProgress(progress)
    work = work or RebuildWork()
    segments = store.list_complete_log()
    if not segments:
        raise NotAStoreError(f"{store} has no commit log: queues and index are rebuilt from it")
    log = LogView.of(segments, store.segment_bytes, own_watermark(store.read_watermark(), segments[0].start_offset))
    survey = work.survey(store, options, log, steps)
    if survey.damage_offset is not None:
        return RebuildReport(RecoveryState.DEGRADED, ExitCode.CORRUPTION, damage_offset=survey.damage_offset,
                             seconds=time.monotonic() - started_s)
    for folder in (store.consume_queue, store.consume_queue_ext, store.index):
        refuse_file(folder)
    index = selection.index and options.message_index_enable
    on_disk = {(topic, queue_id) for topic, queue_id, _ in queue_folders(store.consume_queue)}
    asked = {queue for queue in survey.in_log | on_disk if selection.wants(queue)}
    if selection.topic is not None and not asked:
        where = selection.topic if selection.queue_id is None else f"{selection.topic}, queue {selection.queue_id}"
        raise UsageError(f"neither the log nor the store's folders know {where}")
    made = asked & survey.in_log
    pieces = _pieces(on_disk, made, index)
    unfinished = read_rebuild_marker(store)
    _refuse_broken_neighbours(store, {*pieces, *(unfinished.pieces if unfinished else ())})
    marker = _merged(store, unfinished, pieces)
    on_step("rebuild")
    recovery_marker = _recovery_marker(store, log)
    write_marker(store, recovery_marker)
    write_rebuild_marker(store, marker)
    made_to = work.make(store, options, made, marker)
    if made_to is not None:
        on_step("made")
        write_rebuild_marker(store, replace(marker, is_made=True))
        write_marker(store, replace(recovery_marker, dispatch_from=made_to))
    report = recover(store, options=options, shared=shared, progress=lambda done, total: steps(total + done, 2 * total),
                     on_step=on_step, elsewhere=work.dispatch)
    steps.finish()
    is_refused = report.state is RecoveryState.DEGRADED
    there = store.quarantine / marker.folder
    return RebuildReport(
        state=report.state, exit_code=report.exit_code,
        queues=tuple(sorted(made)), kept=tuple(sorted(asked - made)), index=index,
        replaced=tuple(piece for piece in marker.pieces if (there / piece).exists()),
        quarantine=str(there) if there.exists() else "",
        end_offset=report.end_offset, log_bytes=work.made_bytes or report.dispatched_bytes,
        damage_offset=report.damage_offset if is_refused else None, recovery=report,
        notes=(work.note,) * bool(work.note) + report.notes, seconds=time.monotonic() - started_s,
    )


def _survey_queues(survey: Survey, progress: Progress) -> None:
    segments, size_bytes = survey.log.segments, survey.log.size_bytes
    total = len(segments) * size_bytes
    for number, segment in enumerate(segments):
        base, at = segment.start_offset, segment.start_offset
        end = base + size_bytes
        with mapped(segment.path) as view:
            while at < end:
                touched = touched_queues(view, base, at, min(end, at + _SURVEY_BYTES), multi_dispatch=True)
                if touched.reached == at:  # the record is longer than the slice, or the end or damage is reached
                    touched = touched_queues(view, base, at, end, multi_dispatch=True)
                survey.in_log |= {(queue.topic, queue.queue_id) for queue in touched.queues}
                following: int | None = touched.reached
                if touched.reached == at:
                    following = sync(view, base, at + 1, end) if touched.reason not in ("blank", "zeroes") else None
                if following is None:
                    break
                at = following
                progress(number * size_bytes + at - base, 2 * total)


def _pieces(on_disk: Collection[Queue], made: Collection[Queue], index: bool) -> list[str]:
    """Return the paths to rebuild, relative to the root: a whole topic if the disk has no other queue of it."""
    pieces = []
    for topic in sorted({topic for topic, _ in made}):
        queue_ids = sorted(queue_id for name, queue_id in made if name == topic)
        is_whole = all((name, queue_id) in made for name, queue_id in on_disk if name == topic)
        for folder in ("consumequeue", "consumequeue_ext"):
            pieces += [f"{folder}/{topic}"] if is_whole else [f"{folder}/{topic}/{queue_id}" for queue_id in queue_ids]
    return pieces + ["index"] * index


def _refuse_broken_neighbours(store: MessageStore, pieces: Collection[str]) -> None:
    """Raise StoreRefusedError, before any change, for a queue that is not rebuilt and that recovery would refuse."""
    for _, _, folder in queue_folders(store.consume_queue):
        if not {str(folder.parent.relative_to(store.root)), str(folder.relative_to(store.root))} & set(pieces):
            list_segments(folder, store.queue_file_bytes)


def _merged(store: MessageStore, unfinished: RebuildMarker | None, pieces: list[str]) -> RebuildMarker:
    """Return one marker for the pieces of an interrupted rebuild and those of this one."""
    if unfinished is not None:
        return replace(unfinished, pieces=tuple(dict.fromkeys((*unfinished.pieces, *pieces))), is_made=False)
    number = 1
    quarantine = store.quarantine
    while (quarantine / f"rebuild-{number}").exists() or (quarantine / f"rebuild-{number}.json").exists():
        number += 1
    return RebuildMarker(f"rebuild-{number}", tuple(pieces))


def _recovery_marker(store: MessageStore, log: LogView) -> RecoveryMarker:
    """Return the marker of a recovery that reads the log as it would otherwise, and dispatches all of it."""
    before = read_marker(store)
    path = RecoveryPath.ABNORMAL if store.abort_exists() else RecoveryPath.NORMAL
    scan_from = log.segments[-1].start_offset
    if before is not None:
        path, scan_from = before.path, min(before.scan_from, scan_from)
    return RecoveryMarker(path, scan_from, max(log.min_offset, 0))


# -- pieces for several processes --------------------------------------------------------
#
# A rebuild with many processes (pyengine/spark/store_rebuild.py) writes queues and index files piece by piece, with the same
# bytes as a single dispatch. Everything that is written is synced before a function returns.
#
#     entries  a task writes the entries of one range of the log to queue files that exist already. Entry k is at byte
#              20 k, so ranges may be done in any order and at the same time. If a queue's offsets have gaps or duplicates,
#              the position of an entry depends on the earlier ones: the caller passes the offset that each queue has
#              reached before the range (`run_into`), and the number of its entries.
#     keys     a task writes the keys of one index file, beginning with the record at which the previous file was full.
#              Each call writes a new file, in a sibling of the index folder, since a task may be repeated or run twice
#              at once; the caller gives one of them its name.

class LogRange(NamedTuple):
    """Complete records from `begin` to `end`, in one segment."""

    segment: MappedFile
    begin: int
    end: int


class KeyPlace(NamedTuple):
    """A key of the log: the `number`-th key (from 1) of the record at `offset`."""

    offset: int
    number: int
    store_timestamp_ms: int


def run_into(queue: TouchedQueue, next_offset: int) -> int:
    """Return how many entries a queue that has reached `next_offset` gets from consecutive offsets.

    Entries below that offset exist already; the first one beyond it goes to the queue's end, and so do all later ones.
    """
    return min(queue.count, max(0, queue.max_queue_offset + 1 - next_offset))


def put_entries(store: MessageStore, part: LogRange, begins: Mapping[Queue, int | None], expected: int, *,
                message_delay_level: str, multi_dispatch: bool) -> bool:
    """Put the entries of one range; `begins`: the offset that each queue has reached before it, None: it gets no entry.

    False if the number of entries was not `expected`: then the queues differ from those of a single dispatch, and must be
    written again. Raises DiskError, FlushError.
    """
    dispatcher = _RangeDispatcher(store, begins, DispatchOptions(False, message_delay_level, multi_dispatch))
    with mapped(part.segment.path) as view, dispatcher:
        reached = dispatcher.dispatch(view, part.segment.start_offset, part.begin, part.end)
        return reached == part.end and dispatcher.is_known and dispatcher.loop.struct.queues.written == expected


class _RangeDispatcher(Dispatcher):
    """A dispatcher that gets the ends of queues from its caller, opens only existing files, and syncs each file that it closes."""

    _may_make_files = False

    def __init__(self, store: MessageStore, begins: Mapping[Queue, int | None], options: DispatchOptions) -> None:
        super().__init__(store, store.geometry, options)
        self._begins = begins
        self.is_known = True

    def _add_queue(self, topic: bytes, queue_id: int, queue_offset: int) -> bool:
        queue = self.loop.queues[self.loop.queues.add(topic, queue_id)]
        begin = self._begins.get((topic.decode("utf-8"), queue_id), -1) if is_queue_name(topic) else None
        self.is_known = self.is_known and begin != -1
        queue.next_offset = max(begin or 0, 0)
        queue.refused = begin is None or begin < 0
        return True

    def _close_file(self, number: int) -> None:
        queue = self.loop.queues[number]
        if queue.fd >= 0:
            folder = self._folder(self.loop.queues.topic(number), queue.queue_id)
            sync_file(folder / segment_name(queue.file_start))
        super()._close_file(number)


class FilledIndex(NamedTuple):
    """An index file that does not have its name yet, and the number of its keys."""

    path: Path
    keys: int


def put_keys(
    folder: Path, name: str, layout: IndexLayout, ranges: Sequence[LogRange], after: KeyPlace | None, queue_file_bytes: int
) -> FilledIndex:
    """Write the keys of `ranges` that follow `after`, until it is full, to a new file in `folder` for the index file `name`.

    Each call creates another file. `after`: the last key of the previous index file, None for the
    first one. Raises DiskError (also without the folder), DiskFullError, FlushError; then no file is left.
    """
    path = folder / f"{name}.{uuid.uuid4().hex}"
    with disk_errors("make", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            os.ftruncate(descriptor, layout.size_bytes)
        finally:
            os.close(descriptor)
    try:
        return FilledIndex(path, _fill(path, int(name), layout, ranges, after, queue_file_bytes))
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _fill(
    path: Path, number: int, layout: IndexLayout, ranges: Sequence[LogRange], after: KeyPlace | None, queue_file_bytes: int
) -> int:
    """Fill the empty file; return the number of its keys."""
    mapping, written_to = map_index_file(path, layout, to_write=True)
    try:
        file = IndexFile(mapping, number, layout, written_to)
        try:
            if after is not None:
                file.inherit(IndexHeader(end_timestamp_ms=after.store_timestamp_ms, end_physical_offset=after.offset))
            loop = DispatchLoop(queue_file_bytes, (), new_progress(), index_enabled=True, multi_dispatch=False)
            loop.use_index(file)
            if after is not None:
                loop.struct.indexed_offset, loop.struct.indexed_keys = after.offset, after.number
            for part in ranges:
                begin = part.begin if after is None else max(part.begin, after.offset)
                if begin < part.end and not _put_keys_of(loop, part, begin):
                    break
            keys = loop.struct.keys
            loop.use_index(None)
        finally:
            file.release()
    finally:
        mapping.close()
    sync_file(path)
    return keys


def _put_keys_of(loop: DispatchLoop, part: LogRange, begin: int) -> bool:
    """Put the keys of a range; False if the file is full before all of them are in it."""
    base = part.segment.start_offset
    with mapped(part.segment.path) as view, bounded(view, base, begin, part.end) as data:
        while True:
            reason = loop.run(data, base, begin, part.end)
            begin = loop.struct.reached
            if reason == NEEDS_QUEUE:  # this task does not write entries
                queues = loop.queues
                queues[queues.add(loop.wanted_topic(), loop.struct.wanted_queue_id)].refused = True
            elif reason == NEEDS_INDEX:
                return False
            elif reason == RANGE_END and begin == part.end:
                return True
            else:
                raise InvariantError(f"the log at {begin} is not what it was: {reason}")


def key_place(part: LogRange, number: int) -> KeyPlace:
    """Return the place of the `number`-th key (from 1) of a range; InvariantError if it has fewer keys."""
    base, begin, end = part.segment.start_offset, part.begin, part.end
    passed = 0  # keys of the records before `begin`
    with mapped(part.segment.path) as view:

        def record_from(offset: int) -> int:
            """Return the start of the first record at or after `offset`."""
            return walk(view, base, begin, offset, limit=part.end, check_crc=False).end_offset

        while begin < end:
            single = record_from(begin + 1)
            middle = record_from(max(begin + 1, (begin + end) // 2))
            if middle >= end:
                middle = single
            keys = count_keys(view, base, begin, middle)
            if passed + keys >= number:
                if middle == single:
                    return KeyPlace(begin, number - passed, decode_record(view, begin - base).store_timestamp_ms)
                end = middle
            elif middle > begin:
                begin, passed = middle, passed + keys
            else:
                break
    raise InvariantError(f"the log has no {number} keys in [{part.begin}, {part.end})")
