"""The loops of a whole-store check over bytes: what has to be read, apart from what is made of it.

`CheckWork` reads here, when an outcome is asked for. Whoever has more processors or hosts
(pyengine.spark.store_verify) gives one that has read before; judging and grading stay the same.
"""

from __future__ import annotations

import contextlib
import mmap
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pyengine.formats.index_file import IndexLayout, unpack_entry
from pyengine.formats.record_case import WalkResult
from pyengine.native.dispatch import TouchedQueue, touched_queues
from pyengine.native.store_check import broken_chain, count_keys, first_orphan_key
from pyengine.storage.check.entries import EntriesFound, QueueFile, QueueRules, check_queue_file
from pyengine.storage.check.report import Findings
from pyengine.storage.check.segments import LogSegments
from pyengine.storage.log_scan import SLICE_BYTES
from pyengine.storage.mapped_file import MappedFile, mapped
from pyengine.storage.recovery.queues import QueueState
from pyengine.storage.recovery.walk_ahead import walk_pieces


@dataclass(frozen=True, slots=True)
class IndexPart:
    """The entries [first, end) of an index file of `count` entries."""

    path: Path
    name: str
    layout: IndexLayout
    count: int
    first: int
    end: int


class KeysFound(NamedTuple):
    """How many entries name a record that has their key; `beyond`: the first that the log does not reach, 0 for none."""

    keys: int
    beyond: int
    findings: Findings


class CheckWork:
    """Reads here and now, one piece after the other."""

    def begin(self, log: LogSegments, index_files: Sequence[Path], layout: IndexLayout) -> None:
        """Before anything is read; the log's end is known."""

    def log_is_known(self, log: LogSegments, queues: Sequence[QueueState], rules: QueueRules, root: Path) -> None:
        """The log has been walked; queues and index are looked at next."""

    def walk(self, log: LogSegments, segment: MappedFile, start: int, stop: int) -> Iterator[WalkResult]:
        """Walks from the record at `start`, each where the one before it ended; the last says why it went no further."""
        with mapped(segment.path) as view:
            view.madvise(mmap.MADV_SEQUENTIAL)
            pieces = [(min(at + SLICE_BYTES, stop), False) for at in range(start, stop, SLICE_BYTES)]
            results = walk_pieces(view, segment.start_offset, start, pieces, limit=stop, check_crc=True, check_offset=True)
            with contextlib.closing(results):  # nothing reads on when the caller gives up
                yield from results

    def touched(self, log: LogSegments) -> Iterator[Sequence[TouchedQueue]]:
        """The queues of the whole log, range by range, with the `further` places of records in other queues."""
        for base, start, stop, view in log.ranges(log.min_offset):
            yield touched_queues(view, base, start, stop, apart=True).queues

    def queue_file(self, log: LogSegments, file: QueueFile, rules: QueueRules, after: int) -> EntriesFound:
        """The entries of one file of a queue, the one before it having ended at the record `after`."""
        return check_queue_file(log, file, rules, after)

    def broken_chain(self, path: Path, layout: IndexLayout, count: int) -> int:
        """See native.store_check."""
        with mapped(path) as view:
            return broken_chain(view, layout, count)

    def index_parts(self, path: Path, name: str, layout: IndexLayout, count: int) -> Sequence[IndexPart]:
        """All entries of an index file, in order."""
        return [IndexPart(path, name, layout, count, 1, count)]

    def keys(self, log: LogSegments, part: IndexPart) -> KeysFound:
        """The entries of one part against the log."""
        return check_index_part(log, part)

    def count_keys(self, log: LogSegments, start: int) -> int:
        """How many keys the records from `start` on have."""
        return sum(count_keys(view, base, first, last) for base, first, last, view in log.ranges(start))


def check_index_part(log: LogSegments, part: IndexPart) -> KeysFound:
    """How many entries name a record that the log holds. Entries stand in the log's order."""
    findings, found = Findings(), 0
    with mapped(part.path) as view:

        def offset_of(number: int) -> int:
            return unpack_entry(view, part.layout.entry_at(number)).physical_offset

        at = max(part.first, 1 + bisect_left(range(1, part.count), log.min_offset, key=offset_of))
        while at < part.end:
            offset = offset_of(at)
            segment = log.view_at(offset)
            if segment is None and offset >= log.end:
                return KeysFound(found, at, findings)
            reached = at
            if segment is not None:
                base, limit, log_view = segment
                reached = first_orphan_key(log_view, base, limit, view, part.layout, at, part.end)
            found += reached - at
            if reached == part.end:
                break
            if reached == at and log.is_lost(offset):
                reached += 1
            elif reached == at:
                findings.error("wrong key", part.name, part.layout.entry_at(at),
                               f"entry {at} names {offset}, where no message has its key")
                reached += 1
            at = reached
    return KeysFound(found, 0, findings)
