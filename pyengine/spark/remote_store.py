"""A store on another file system, read by ranges, for plans, streams and tasks.

A RemoteStore has the interface of a StoreReader for a stopped store, since a file system does not show whether an engine runs. The
end of each level comes from the files, by the rules of storage/read_level.py; this reader syncs nothing.

It reads the state of the store once, and again at each `refresh`: it lists the files first, then fetches the small ones, then
ranges. It caches blocks of queue files until a list shows that the file has changed, or may have.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pyengine.arguments import Closing
from pyengine.errors import NotAStoreError, StoreRefusedError, UsageError
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.paths import is_queue_id_name, log_folders, parse_segment_name, segment_name
from pyengine.formats.record import Message
from pyengine.results import ReadLevel
from pyengine.spark.file_access import (
    LOG,
    QUEUES,
    FetchedFile,
    FetchedSegment,
    FileMark,
    FileTree,
    open_tree,
    reach_tree,
)
from pyengine.spark.options import ReadOptions
from pyengine.storage.commit_log import SegmentBytes, message_below
from pyengine.storage.config import load_config
from pyengine.storage.config_table import SubscriptionGroups
from pyengine.storage.consume_queue import ConsumeQueue
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.message_store import segment_size
from pyengine.storage.read_level import FilesWatermark

if TYPE_CHECKING:
    from pyengine.engine_config import Geometry
    from pyengine.ipc.live_reader import LiveStoreReader

OpenStore: TypeAlias = "LiveStoreReader | RemoteStore"
_CONFIG = ("watermark", "sync-failure", "engine.toml", "recovery", "recovered", "topics.json", "replication.json")
OFFSETS, GROUPS = "config/consumerOffset.json", "config/subscriptionGroup.json"
_SIZE = "mapped_file_size_commit_log_bytes"
REFRESH_INTERVAL_S = 1.0
# S3 has times in whole seconds: a file that was written just before the list may have been written again after it.
SETTLED_NS = 60_000_000_000
SAMPLE_HEAD_BYTES, SAMPLE_TAIL_BYTES = 64, 4096  # of a segment: its first record's head up to the store time; some records
FILES_MAX = 1024
_THREADS = 16


def open_for_reading(options: ReadOptions) -> OpenStore:
    """Open the store of a read: on this host, with its engine's counters if one runs, or on another file system."""
    if options.is_remote:
        return RemoteStore(reach_tree(options.path, options.file_system), options.sizes)
    from pyengine.ipc.live_reader import open_store

    return open_store(options.path, **options.sizes)


def committed_offsets(options: ReadOptions) -> dict[tuple[str, str], dict[int, int]]:
    """Return, in a task, the offsets of the store's consumer groups, by (topic, group) and queue."""
    if not options.is_remote:
        return ConsumerOffsets(options.path).groups()
    with RemoteStore(open_tree(options.path, options.file_system), options.sizes) as store:
        return consumer_offsets(store).groups()


def consumer_offsets(store: OpenStore) -> ConsumerOffsets:
    """Return the offsets of the store's consumer groups."""
    if isinstance(store, RemoteStore):
        store.small_files(OFFSETS, f"{OFFSETS}.bak")
    return ConsumerOffsets(store.root)


def consumer_groups(store: OpenStore) -> set[str]:
    """Return every group that has committed an offset, or is in subscriptionGroup.json."""
    if isinstance(store, RemoteStore):
        store.small_files(GROUPS, f"{GROUPS}.bak")
    return {group for _, group in consumer_offsets(store).groups()} | SubscriptionGroups(store.root).read().rows.keys()


class LogSample(NamedTuple):
    """Bytes by which a log is known again up to an offset: the first of its last segment, and the last."""

    head: bytes
    tail: bytes

    @property
    def text(self) -> str:
        return f"{zlib.crc32(self.head):08x}{zlib.crc32(self.tail):08x}"

    def is_of(self, text: str) -> bool:
        """Whether an earlier call of text(), or version 0.2.0, got `text` from the same bytes."""
        return text in (self.text, self.head.hex() + self.tail[-SAMPLE_HEAD_BYTES:].hex())


def log_sample(store: OpenStore, end: int) -> LogSample | None:
    """Return the sample of the log up to `end`; None for an empty log, and if its segment is deleted, or is not there (yet).

    Slaves, backups and copies of a store share it. A log that was made anew, or cut below `end` and written further, has another
    one, since the head of a record has its time.
    """
    size_bytes = store.commit_log.size_bytes
    start = (end - 1) // size_bytes * size_bytes
    segment = store.commit_log.segment_at(start) if end > 0 else None
    if segment is None:
        return None

    with contextlib.closing(segment):
        sample = LogSample(segment.read(start, min(start + SAMPLE_HEAD_BYTES, end)),
                           segment.read(max(start, end - SAMPLE_TAIL_BYTES), end))
    return sample if start >= store.commit_log.min_offset else None  # deleted meanwhile: its blocks may have been freed


def segments_of(store: OpenStore, begin: int, end: int) -> Iterator[tuple[SegmentBytes, int, int]]:
    """Yield (segment, first byte, limit) of each existing segment with bytes of [begin, end), and close it after its use."""
    for start in list(store.commit_log.starts()):
        first, limit = max(begin, start), min(end, start + store.commit_log.size_bytes)
        segment = store.commit_log.segment_at(start) if first < limit else None
        if segment is not None:
            with contextlib.closing(segment):
                yield segment, first, limit


def prefetch_queue_ends(store: OpenStore, queues: Iterable[ConsumeQueue], limit: int) -> None:
    """Fetch the starts and ends of many queues at once, unless one has files that are refused; do nothing for mapped files."""
    if isinstance(store, RemoteStore):
        first = store.min_physical_offset
        with contextlib.suppress(StoreRefusedError), ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda queue: queue.min_offset(first, queue.max_offset(limit)), queues))


class RemoteLog:
    """The segments of the last list; StoreRefusedError unless all have one length."""

    def __init__(self, tree: FileTree, wanted_size_bytes: int | None) -> None:
        self._tree = tree
        self._wanted_size_bytes = wanted_size_bytes
        self.size_bytes = 0
        self._starts: list[int] = []
        self.refresh()

    def refresh(self) -> None:
        """List the folder."""
        tree, wanted_size_bytes = self._tree, self._wanted_size_bytes
        found: dict[int, int] = {}
        for name, mark in tree.entries(LOG).items():
            if name.startswith("."):  # rsync is copying it
                continue
            start = parse_segment_name(name)
            if start is None or mark is None:
                raise StoreRefusedError(f"{tree.root}/{LOG}/{name} does not belong there; move it elsewhere")
            found[start] = mark.size
        sizes = sorted(set(found.values()))
        if len(sizes) > 1 or sizes == [0]:
            raise StoreRefusedError(f"the segments in {tree.root}/{LOG} have {sizes[0]} and {sizes[-1]} bytes: all must have one length")
        if sizes and wanted_size_bytes not in (None, sizes[0]):
            raise UsageError(f"the segments have {sizes[0]} bytes, not {wanted_size_bytes} as {_SIZE} says")
        self.size_bytes = sizes[0] if sizes else self.size_bytes
        for start in found:
            if start % self.size_bytes:
                raise StoreRefusedError(f"{tree.root}/{LOG}/{segment_name(start)}: its name is not a multiple of {self.size_bytes}")
        self._starts = sorted(found)

    def starts(self) -> list[int]:
        """Return the start offsets, ascending; do not modify the list."""
        return self._starts

    @property
    def min_offset(self) -> int:
        """Return the start of the first segment, -1 without any."""
        return self._starts[0] if self._starts else -1

    def segment_at(self, offset: int) -> FetchedSegment | None:
        """Open the segment that has `offset`; None if there is none. The folder is listed again if it was deleted since."""
        at = bisect_right(self._starts, offset) - 1
        if at >= 0 and offset < self._starts[at] + self.size_bytes:
            try:
                return self.open(self._starts[at])
            except FileNotFoundError:
                self.refresh()
        return None

    def open(self, start: int) -> FetchedSegment:
        """Open the segment, to read ranges of it; FileNotFoundError if it was deleted."""
        return FetchedSegment(self._tree.open(f"{LOG}/{segment_name(start)}"), start)


class RemoteQueueFiles:
    """A queue's files, with the interface of a MappedFileQueue: listed by the store, fetched by slices."""

    is_mapped = False

    def __init__(self, store: RemoteStore, folder: str, size_bytes: int) -> None:
        self._store = store
        self._folder = folder
        self.size_bytes = size_bytes

    def starts(self) -> list[int]:
        """Return the start offsets of the last list, ascending; StoreRefusedError as MappedFileQueue.starts."""
        found = []
        for name, mark in self._store.queue_files().get(self._folder, {}).items():
            start = parse_segment_name(name)
            if start is None or start % self.size_bytes:
                raise StoreRefusedError(f"{self._folder}/{name} does not belong there; move it away (RocketMQ refuses the store too)")
            if mark.size != self.size_bytes:
                raise StoreRefusedError(f"{self._folder}/{name} has {mark.size} bytes, not {self.size_bytes}, "
                                        "the size of this folder's files")
            found.append(start)
        return sorted(found)

    def start_of(self, offset: int) -> int | None:
        """Return the start of the file that has byte `offset` of the queue, or None."""
        start = offset - offset % self.size_bytes
        return start if segment_name(start) in self._store.queue_files().get(self._folder, {}) else None

    def view(self, start: int) -> FetchedFile | None:
        """Return the file's bytes, to be read by slices; None if it does not exist."""
        return self._store.fetched(f"{self._folder}/{segment_name(start)}")


class _RemoteWatermark(FilesWatermark):
    """Finds the end of each level from the files alone."""

    def _synced_here(self, sure: int, end: int) -> int:
        return sure  # nothing is synced over a file system


class _Fetched(NamedTuple):
    """A cached file: the time of its first fetch, its entry in a list, and the number of that list."""

    file: FetchedFile
    mark: FileMark
    fetched_ns: int
    refreshes: int


class RemoteStore(Closing):
    """A store on another file system, in its state at the last refresh; a context manager."""

    is_live = False  # no engine's counters can be read

    def __init__(self, tree: FileTree, sizes: Mapping[str, int]) -> None:
        names = tree.entries("")
        if not names.keys() & {LOG, QUEUES, "config", "checkpoint", "lock"}:
            raise NotAStoreError(f"{tree.root} holds no store")
        self._tree = tree
        self._sizes = sizes
        self._folder = TemporaryDirectory(prefix="pyengine-remote-")
        self.root = Path(self._folder.name)  # the store's small files, on this host
        self._small: dict[str, tuple[FileMark, int]] = {}  # and when they were fetched, ns
        self._queue_files: dict[str, dict[str, FileMark]] | None = None
        self._fetched: OrderedDict[str, _Fetched] = OrderedDict()
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._limits: dict[ReadLevel, int] = {}
        self._queue_limits: dict[ReadLevel, int] = {}
        self._refreshes = 0
        self._lock = Lock()
        try:
            self._fetch_small_files()
            if log_folders(self.root).all != (self.root / LOG,):
                raise UsageError(f"the log of {tree.root} is in other folders than {LOG}: mount them to read it")
            self.commit_log = RemoteLog(tree, sizes.get(_SIZE))
        except BaseException:
            self.close()
            raise
        self._watermark = _RemoteWatermark(self.root, self.commit_log)  # type: ignore[arg-type]  # it has the members that are used
        self._refreshed_s = time.monotonic()

    def refresh(self) -> None:
        """Read the state of the store again; at most once in REFRESH_INTERVAL_S."""
        if time.monotonic() - self._refreshed_s < REFRESH_INTERVAL_S:
            return
        # The watermark is put last, so what is listed after it reaches at least as far.
        self._fetch_small_files()
        self.commit_log.refresh()
        self._queue_files = None
        self._limits.clear()
        self._queue_limits.clear()
        self._refreshes += 1
        self._refreshed_s = time.monotonic()

    # -- how far ------------------------------------------------------------------

    def max_physical_offset(self, level: ReadLevel) -> int:
        """Return the log's end for this level; UsageError if it cannot be known."""
        if level not in self._limits:
            self._limits[level] = self._watermark.limit(level)
        return self._limits[level]

    def dispatched_offset(self, level: ReadLevel) -> int:
        """Return the offset below which entries of queues are read at this level; whether queues are complete is unknown."""
        if level not in self._queue_limits:
            self._queue_limits[level] = min(self.max_physical_offset(level), self._watermark.queue_limit(level))
        return self._queue_limits[level]

    @property
    def last_store_timestamp_ms(self) -> int:
        """Return the store time of the last message that was read to find the log's end; -1 if none was."""
        return self._watermark.end.last_store_timestamp_ms

    # -- the log ------------------------------------------------------------------

    @property
    def min_physical_offset(self) -> int:
        """Return the start of the log's first segment, -1 without any."""
        return self.commit_log.min_offset

    def _missing_part(self) -> str:
        return ""  # it has one folder

    def _message_below(self, physical_offset: int, limit: int) -> Message | None:
        """Return the message that starts at this offset and ends at or below `limit`, or None."""
        return message_below(self.commit_log, physical_offset, limit)  # type: ignore[arg-type]  # it has the members that are used

    # -- queues -------------------------------------------------------------------

    @cached_property
    def geometry(self) -> Geometry:
        """The sizes of its files, from engine.toml, or from the files' lengths."""
        found = load_config(self.root, self._sizes).geometry
        if not (self.root / "config" / "engine.toml").exists():
            listed = [[(start, mark.size) for name, mark in files.items() if (start := parse_segment_name(name)) is not None]
                      for files in self.queue_files().values()]
            size_bytes = segment_size(listed, CQ_ENTRY_BYTES)
            if size_bytes is not None:
                found = replace(found, mapped_file_size_consume_queue_bytes=size_bytes)
        return found

    def queue_folders(self, topic: str = "") -> set[str]:
        """Return the names of the topics that have queues, or of one topic's queues."""
        return set(self._tree.entries(f"{QUEUES}/{topic}" if topic else QUEUES))

    def queue_files(self) -> dict[str, dict[str, FileMark]]:
        """Return the files of each queue by its folder; they are listed once in a refresh."""
        if self._queue_files is None:
            found: dict[str, dict[str, FileMark]] = {}
            for path, mark in self._tree.files(QUEUES, recursive=True).items():
                folder, _, name = path.rpartition("/")
                if name.startswith("."):
                    continue
                found.setdefault(f"{QUEUES}/{folder}", {})[name] = mark
            self._queue_files = found
        return self._queue_files

    def topics(self) -> dict[str, list[int]]:
        """Return topic -> queue ids, both sorted, of every queue that has a file."""
        found: dict[str, list[int]] = {}
        for folder in self.queue_files():
            topic, _, name = folder.removeprefix(f"{QUEUES}/").rpartition("/")
            if topic and "/" not in topic and is_queue_id_name(name):
                found.setdefault(topic, []).append(int(name))
        return {topic: sorted(found[topic]) for topic in sorted(found)}

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return the reader of one queue's entries, None for a queue that does not exist."""
        folder = f"{QUEUES}/{topic}/{queue_id}"
        if folder not in self.queue_files():
            return None
        if (topic, queue_id) not in self._queues:
            files = RemoteQueueFiles(self, folder, self.geometry.mapped_file_size_consume_queue_bytes)
            none = RemoteQueueFiles(self, "", self.geometry.mapped_file_size_consume_queue_ext_bytes)  # no read uses extensions
            self._queues[topic, queue_id] = ConsumeQueue(topic, queue_id, files, none)  # type: ignore[arg-type]  # as above
        return self._queues[topic, queue_id]

    def queue_range(self, topic: str, queue_id: int, level: ReadLevel = ReadLevel.COMMITTED) -> tuple[int, int]:
        """Return (first readable offset, offset after the last); (0, 0) for a queue that does not exist."""
        queue = self._queue(topic, queue_id)
        high = 0 if queue is None else queue.max_offset(self.dispatched_offset(level))
        return (queue.min_offset(self.min_physical_offset, high), high) if queue is not None and high else (0, 0)

    def fetched(self, path: str) -> FetchedFile | None:
        """Return a queue's file, None if it does not exist; cached blocks are of its content at the last list, or later."""
        folder, _, name = path.rpartition("/")
        mark = self.queue_files().get(folder, {}).get(name)
        if mark is None:
            return None
        with self._lock:
            known = self._fetched.get(path)
            if known is not None and (known.refreshes == self._refreshes or _is_same(known.mark, known.fetched_ns, mark)):
                self._fetched.move_to_end(path)
                return known.file
        fetched_ns = time.time_ns()
        try:
            made = FetchedFile(self._tree.open(path))
        except FileNotFoundError:
            return None
        with self._lock:
            self._fetched[path] = _Fetched(made, mark, fetched_ns, self._refreshes)
            if len(self._fetched) > FILES_MAX:
                self._fetched.popitem(last=False)
        return made

    # -- small files --------------------------------------------------------------

    def small_files(self, *names: str) -> None:
        """Fetch more small files of the store to `root`, if they exist."""
        for name in names:
            content = self._tree.read(name)
            if content is not None:
                (self.root / name).parent.mkdir(exist_ok=True)
                (self.root / name).write_bytes(content)

    def _fetch_small_files(self) -> None:
        """Fetch the small files that have changed, or may have, since they were fetched."""
        marks = {name: mark for name, mark in self._tree.files("").items() if name in ("checkpoint", "abort")}
        marks |= {f"config/{name}": mark for name, mark in self._tree.files("config").items() if name in _CONFIG}
        for name in self._small.keys() - marks.keys():
            (self.root / name).unlink(missing_ok=True)
            del self._small[name]
        for name, mark in marks.items():
            known = self._small.get(name)
            if known is None or not _is_same(known[0], known[1], mark):
                self._small[name] = mark, time.time_ns()
                self.small_files(name)

    def close(self) -> None:
        """Remove the fetched files."""
        self._folder.cleanup()
        self._fetched.clear()
        self._queues.clear()


def _is_same(known: FileMark, fetched_ns: int, listed: FileMark) -> bool:
    """Return whether bytes fetched at that time, of a file listed as `known`, are still its content."""
    return known == listed and listed.modified_ns is not None and fetched_ns - listed.modified_ns > SETTLED_NS
