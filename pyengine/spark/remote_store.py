"""What planning a read needs to know of a store on another file system: its segments, and where the log ends.

It gives what a StoreReader gives for a store at rest, but reads by ranges. A file system
does not show whether an engine runs. So a store is flushed as far as its engine has noted
in config/watermark. One without a watermark is flushed to its end if it was stopped in
order (no file `abort`) and no sync of it has failed (no config/sync-failure).
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from pyengine.errors import NotAStoreError, StoreRefusedError, UsageError
from pyengine.formats.paths import log_folders, parse_segment_name, segment_name
from pyengine.formats.record_case import CaseLabel, WalkResult
from pyengine.results import ReadLevel
from pyengine.spark.file_access import LOG, FetchedSegment, FileTree, judge, walk_piece
from pyengine.storage.checkpoint import abort_file_exists
from pyengine.storage.log_scan import HEAD_BYTES, LogEnd, LogView, Owner, Piece
from pyengine.storage.mapped_file import MappedFile
from pyengine.storage.watermark import WatermarkReading, read_sync_failure, read_watermark

_SMALL_FILES = (
    "config/watermark", "config/sync-failure", "config/engine.toml", "config/recovery", "config/recovered", "config/topics.json",
    "checkpoint", "abort",
)
QUEUES = "consumequeue"
_SIZE = "mapped_file_size_commit_log_bytes"


class RemoteLog:
    """The segments, listed once. All have one length, or StoreRefusedError."""

    def __init__(self, tree: FileTree, wanted_size_bytes: int | None) -> None:
        self._tree = tree
        found: dict[int, int] = {}
        for name, length in tree.folders_and_sizes(LOG).items():
            start = parse_segment_name(name)
            if start is None or length is None:
                raise StoreRefusedError(f"{tree.root}/{LOG}/{name} does not belong there; move it elsewhere")
            found[start] = length
        sizes = sorted(set(found.values()))
        if len(sizes) > 1 or sizes == [0]:
            raise StoreRefusedError(f"the segments in {tree.root}/{LOG} have {sizes[0]} and {sizes[-1]} bytes: all must have one length")
        if sizes and wanted_size_bytes not in (None, sizes[0]):
            raise UsageError(f"the segments have {sizes[0]} bytes, not {wanted_size_bytes} as {_SIZE} says")
        self.size_bytes = sizes[0] if sizes else 0
        self._starts = sorted(found)
        for start in self._starts:
            if start % self.size_bytes:
                raise StoreRefusedError(f"{tree.root}/{LOG}/{segment_name(start)}: its name is no multiple of {self.size_bytes}")

    def starts(self) -> list[int]:
        """Start offsets, ascending. Not to be modified."""
        return self._starts

    @property
    def min_offset(self) -> int:
        """Start of the first segment, -1 without any."""
        return self._starts[0] if self._starts else -1

    def start_of(self, offset: int) -> int | None:
        """The start of the segment that holds `offset`, or None."""
        at = bisect_right(self._starts, offset) - 1
        return self._starts[at] if at >= 0 and offset < self._starts[at] + self.size_bytes else None

    def open(self, start: int) -> FetchedSegment:
        """The segment, to read ranges of. FileNotFoundError when it was deleted."""
        return FetchedSegment(self._tree.open(f"{LOG}/{segment_name(start)}"), start)


class RemoteLogEnd(LogEnd):
    """The log's end by the same rules, read by ranges."""

    def __init__(self, root: Path, log: RemoteLog) -> None:
        super().__init__(root, log)  # type: ignore[arg-type]  # it has the three members that LogEnd uses
        self._remote = log

    def _view(self, log: LogView) -> LogView:
        return _RemoteLogView(log.segments, log.size_bytes, log.watermark, log.verified_from, remote=self._remote)


@dataclass(frozen=True, slots=True)
class _RemoteLogView(LogView):
    """The log by ranges of its segments."""

    remote: RemoteLog = field(kw_only=True)

    def head(self, segment: MappedFile) -> bytes:
        start = segment.start_offset
        with contextlib.closing(self.remote.open(start)) as fetched:
            fetched.fill(start, start + HEAD_BYTES, start + self.size_bytes)
            return bytes(fetched.view[:HEAD_BYTES])

    def label_at(self, segment: MappedFile, offset: int) -> str:
        with contextlib.closing(self.remote.open(segment.start_offset)) as fetched:
            return judge(fetched, offset, segment.start_offset + self.size_bytes)

    def walk(
        self, segment: MappedFile, start: int, pieces: Sequence[Piece], *, limit: int, check_crc: bool
    ) -> Generator[WalkResult, None, None]:
        with contextlib.closing(self.remote.open(segment.start_offset)) as fetched:
            for stop, strict in pieces:
                if start >= stop:
                    continue
                result = walk_piece(fetched, start, stop, limit=limit, check_crc=check_crc, strict=strict,
                                    check_offset=self.owner is Owner.OURS)
                yield result
                start = result.end_offset
                if result.reason != CaseLabel.RANGE_END or start < stop:
                    return


class RemoteStore:
    """A store on another file system, as it is when it is opened; a context manager."""

    is_live = False  # no engine's counters can be read

    def __init__(self, tree: FileTree, sizes: Mapping[str, int]) -> None:
        names = tree.folders_and_sizes("")
        if not names.keys() & {LOG, "consumequeue", "config", "checkpoint", "lock"}:
            raise NotAStoreError(f"{tree.root} holds no store")
        self._small = TemporaryDirectory(prefix="pyengine-remote-")
        self._tree = tree
        self.root = Path(self._small.name)  # the store's small files, on this host
        try:
            self._fetch_small_files(tree)
            if log_folders(self.root).all != (self.root / LOG,):
                raise UsageError(f"the log of {tree.root} is in other folders than {LOG}: mount them to read it")
            self.commit_log = RemoteLog(tree, sizes.get(_SIZE))
        except BaseException:
            self.close()
            raise
        self._end = RemoteLogEnd(self.root, self.commit_log)

    def max_physical_offset(self, level: ReadLevel) -> int:
        """Where the log ends for this level. UsageError for one that cannot be known."""
        if level is ReadLevel.REPLICATED:
            raise UsageError("nothing is replicated here: choose the level flushed, committed or written")
        end = self._end.find()
        if level is not ReadLevel.FLUSHED:
            return end
        durable = read_watermark(self.root).watermark
        if durable is not None:
            return min(durable.flushed, end)
        if abort_file_exists(self.root) or read_sync_failure(self.root) is not None:
            raise UsageError("the level `flushed` cannot be told over a file system for a store that was not stopped in "
                             "order, or whose last sync failed, and that has no config/watermark: choose committed")
        return end

    @property
    def last_store_timestamp_ms(self) -> int:
        """When the last message below the log's end was stored, by what was read to find it; -1 where nothing was."""
        return self._end.last_store_timestamp_ms

    def durable_watermark(self) -> WatermarkReading:
        """What its own engine noted as synced."""
        return read_watermark(self.root)

    def _fetch_small_files(self, tree: FileTree) -> None:
        for name in _SMALL_FILES:
            content = tree.read(name)
            if content is not None:
                (self.root / name).parent.mkdir(exist_ok=True)
                (self.root / name).write_bytes(content)

    def queue_folders(self, topic: str = "") -> set[str]:
        """The names of the topics that have queues, or of one topic's queues."""
        return set(self._tree.folders_and_sizes(f"{QUEUES}/{topic}" if topic else QUEUES))

    def close(self) -> None:
        """Remove what was fetched."""
        self._small.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
