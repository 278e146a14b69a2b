"""From where the log must be dispatched again so that no queue and no index lacks anything.

RocketMQ takes the segment where an abnormal recovery began to read, else the farthest
record that any queue knows (DefaultMessageStore.start). That is right
as long as queues lose nothing but their newest entries. The start is earlier here where
it would otherwise leave something out that the log still holds:

    what is missing                                      start
    every queue                                          the log's first record
    all entries since the farthest one, which lies       that entry
    before the segment where the reading began
    entries in the middle of a queue                     the last entry before the hole
    index files that could not be believed               where the last believed one ends
    entries between a queue's end and its first message  that queue's last entry, or the
    behind the start (seen while dispatching)            log's first record without one

When shared memory counts, everything below its `reput_from` has been dispatched.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

from pyengine.native.dispatch import touched_queues
from pyengine.native.scan import sync, walk
from pyengine.storage.log_scan import LogView
from pyengine.storage.mapped_file import mapped
from pyengine.storage.recovery.index import IndexPlan
from pyengine.storage.recovery.queues import QueueCut
from pyengine.storage.recovery.report import RecoveryPath

_SLICE_BYTES = 1 << 20


def dispatch_start(
    log: LogView, path: RecoveryPath, scan_from: int, end: int, cuts: Sequence[QueueCut], index: IndexPlan,
    *, reput_from: int | None, index_enabled: bool, multi_dispatch: bool,
) -> int:
    """The start as the table says; `end` when nothing is missing. Queues and index are taken as the plans leave them.

    `reput_from`: of shared memory that counts, else None.
    """
    log_min = max(log.min_offset, 0)
    farthest = max((cut.after.max_physical_offset for cut in cuts), default=-1)
    if farthest <= log_min:
        wanted = [log_min]
    elif reput_from is not None:
        wanted = [reput_from]
    else:
        wanted = [farthest, scan_from] if path is RecoveryPath.ABNORMAL else [farthest]
    wanted += [cut.rebuild_from for cut in cuts if cut.rebuild_from is not None]
    if index.enter_from is not None and index_enabled:
        wanted.append(index.enter_from)
    start = record_start(log, max(log_min, min(wanted)))
    if index.enter_from is None and not _has_entries(log, start, end, multi_dispatch):
        return end  # nothing but blanks, prepared and rolled back messages
    return start


def record_start(log: LogView, offset: int) -> int:
    """`offset` when a record begins or the log's last one ends there, else the start of its segment."""
    index = log.index_of(offset)
    if index is None:
        return max(offset, log.min_offset, 0)
    base = log.segments[index].start_offset
    if offset == base:
        return base
    with mapped(log.segments[index].path) as view:
        reached = walk(
            view, base, base, offset, check_crc=False, check_offset=False, limit=base + log.size_bytes
        ).end_offset
    return offset if reached == offset else base


def queues_between(log: LogView, start: int, end: int, multi_dispatch: bool) -> Iterator[tuple[str, int]]:
    """The queues that the records of [start, end) have entries in, as far as they can be read; each perhaps several times."""
    for view, base, at, stop in _mapped_parts(log, start, end):
        while at < stop:
            touched = touched_queues(view, base, at, stop, multi_dispatch=multi_dispatch)
            yield from ((queue.topic, queue.queue_id) for queue in touched.queues)
            if touched.reason == "blank" or touched.reached == stop:
                break
            following = sync(view, base, touched.reached + 1, stop) if touched.reached + 1 < stop else None
            at = stop if following is None else following


def _has_entries(log: LogView, start: int, end: int, multi_dispatch: bool) -> bool:
    """True when a record of [start, end) has an entry in any queue; what cannot be read counts as such."""
    for view, base, at, stop in _mapped_parts(log, start, end):
        while at < stop:
            touched = touched_queues(view, base, at, min(stop, at + _SLICE_BYTES), multi_dispatch=multi_dispatch)
            if touched.queues:
                return True
            if touched.reached == at:
                if touched.reason == "blank":
                    break
                return True
            at = touched.reached
    return False


def _mapped_parts(log: LogView, start: int, end: int) -> Iterator[tuple[mmap.mmap, int, int, int]]:
    """(mapping, its first offset, start, end) of each segment's part of [start, end); mapped until the next one is asked for."""
    for segment in log.segments:
        base = segment.start_offset
        at, stop = max(start, base), min(end, base + log.size_bytes)
        if at < stop:
            with mapped(segment.path) as view:
                yield view, base, at, stop
