"""From where the log must be dispatched again so that no queue and no index lacks anything.

RocketMQ takes the segment where an abnormal recovery began to read, else the farthest
record that any queue knows (ReputMessageService, BEHAVIOUR section 9). That is right
as long as queues lose nothing but their newest entries. The start is earlier here where
it would otherwise leave something out that the log still holds:

    what is missing                                   start
    every queue, or one that did not begin with the   the log's first record
    first of its messages behind the start
    all that came after the farthest entry, and it    that entry
    lies before the segment where the reading began
    entries in the middle of a queue                  the last entry before the hole
    entries between a queue's end and its first       that queue's last entry
    message behind the start
    index files that could not be believed            where the last believed one ends
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from pyengine.native.dispatch import touched_queues
from pyengine.native.scan import walk
from pyengine.storage.index_recovery import IndexPlan
from pyengine.storage.log_scan import LogView
from pyengine.storage.queue_recovery import QueueCut, QueueState
from pyengine.storage.recovery_report import RecoveryPath
from pyengine.storage.segment_files import map_read_only


def dispatch_start(
    log: LogView, path: RecoveryPath, scan_from: int, end: int, cuts: Sequence[QueueCut], index: IndexPlan,
    *, index_enabled: bool, multi_dispatch: bool,
) -> int:
    """The start as the table says; `end` when nothing is missing. Queues and index are taken as the plans leave them."""
    log_min = max(log.min_offset, 0)
    farthest = max((cut.after.max_physical_offset for cut in cuts), default=-1)
    wanted = [farthest if farthest > log_min else log_min]
    if path is RecoveryPath.ABNORMAL:
        wanted.append(scan_from)
    wanted += [cut.rebuild_from for cut in cuts if cut.rebuild_from is not None]
    if index.enter_from is not None and index_enabled:
        wanted.append(index.enter_from)
    start = record_start(log, max(log_min, min(wanted)))
    queues = {(cut.after.topic, cut.after.queue_id): cut.after for cut in cuts if cut.after.max_physical_offset >= 0}
    while True:
        firsts = _first_offsets(log, start, end, multi_dispatch)
        earlier = _before_gaps(log, firsts, queues, start)
        if earlier == start:
            break
        start = earlier
    if path is RecoveryPath.NORMAL and index.enter_from is None and not firsts:
        return end  # nothing but blanks, prepared and rolled back messages
    return start


def record_start(log: LogView, offset: int) -> int:
    """`offset` when a record begins or the log's last one ends there, else the start of its segment."""
    index = log.index_of(offset)
    if index is None:
        return max(offset, log.min_offset, 0)
    base = log.segments[index].start_offset
    with contextlib.closing(map_read_only(log.segments[index].path)) as view:
        reached = walk(
            view, base, base, offset, check_crc=False, check_offset=False, limit=base + log.size_bytes
        ).end_offset
    return offset if reached == offset else base


def _first_offsets(log: LogView, start: int, end: int, multi_dispatch: bool) -> dict[tuple[str, int], int]:
    """The lowest queue offset of each queue that the records of [start, end) have entries in."""
    firsts: dict[tuple[str, int], int] = {}
    for segment in log.segments:
        base = segment.start_offset
        first, last = max(start, base), min(end, base + log.size_bytes)
        if first >= last:
            continue
        with contextlib.closing(map_read_only(segment.path)) as view:
            for queue in touched_queues(view, base, first, last, multi_dispatch=multi_dispatch).queues:
                key = queue.topic, queue.queue_id
                firsts[key] = min(queue.min_queue_offset, firsts.get(key, queue.min_queue_offset))
    return firsts


def _before_gaps(
    log: LogView, firsts: dict[tuple[str, int], int], queues: dict[tuple[str, int], QueueState], start: int
) -> int:
    """An earlier start, from which on the queues that `firsts` would leave a gap in are whole; else `start`."""
    log_min = max(log.min_offset, 0)
    wanted = []
    for key, first in firsts.items():
        queue = queues.get(key)
        if queue is None and first > 0:
            wanted.append(log_min)
        elif queue is not None and first > queue.max_offset:
            wanted.append(max(log_min, queue.max_physical_offset))
    return record_start(log, min(wanted)) if wanted and min(wanted) < start else start
