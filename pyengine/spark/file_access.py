"""Reads a store's files in driver and tasks over a file system of pyarrow, by ranges, without mapping or writing.

Fetched bytes of a segment are a moving window, so memory stays at about FETCH_BYTES for any partition.
"""

from __future__ import annotations

import importlib
import itertools
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy

from pyengine.errors import CorruptionError, UsageError
from pyengine.formats.constants import CQ_FILLER_SIZE, MESSAGE_MAGIC
from pyengine.formats.record import BEGIN, HEAD_BY_FLAGS, I64, MAGIC_AT, PHYSICAL_OFFSET_AT, TRAILER_BYTES, WalkResult
from pyengine.native.scan import classify
from pyengine.spark.options import ARROW, AUTO, scheme_of, shown
from pyengine.storage.commit_log import SegmentBytes

if TYPE_CHECKING:
    from pyarrow import NativeFile
    from pyarrow.fs import FileSystem

    from pyengine.native.scan import Checks, ColumnScanner, RawBatch

LOG, QUEUES = "commitlog", "consumequeue"
REACH_TIMEOUT_S = 10.0
_ADVICE = {
    "hdfs": "pyarrow reads HDFS with Hadoop's own library, which JAVA_HOME, HADOOP_HOME and CLASSPATH name to driver and workers; "
            "or mount it",
    "s3": "look at the bucket's name, the credentials and the region (AWS_REGION, AWS_ENDPOINT_URL), or mount it",
}
FETCH_BYTES = 16 << 20
# The first range that is fetched to find a record's start: most records end within it.
RECORD_PROBE_BYTES = 256 << 10
TAIL_PROBE_BYTES = 16 << 10  # at the probable end of the log
# Records of queue entries at smaller distances are fetched together, since another request takes longer than these bytes.
GAP_BYTES = 1 << 20
BLOCK_BYTES = 64 << 10
_BEGIN_BYTES = BEGIN.size
_RECORD_BYTES_MIN = HEAD_BY_FLAGS[0].size + TRAILER_BYTES
_MAGIC = MESSAGE_MAGIC.to_bytes(4, "big")


# -- file systems ------------------------------------------------------------------


def uri_of(path: str) -> str:
    """Return the URI for pyarrow, with s3 for Hadoop's two names of it."""
    return re.sub("^s3[an]://", "s3://", path, flags=re.IGNORECASE)


class FileMark(NamedTuple):
    """What a listing tells of a file's content; the time None where the file system has none."""

    size: int
    modified_ns: int | None


@dataclass(frozen=True, slots=True)
class FileTree:
    """A folder of a file system; names are relative to it, with slashes."""

    system: FileSystem
    root: str
    """As the file system begins the paths that it lists."""

    def entries(self, folder: str, *, recursive: bool = False) -> dict[str, FileMark | None]:
        """Return what is in a folder by path, with `recursive` also in its folders, which have None; empty if there is no such folder."""
        from pyarrow.fs import FileSelector, FileType

        root = self._path(folder)
        if (fsspec := _fsspec_of(self.system)) is not None:
            fsspec.invalidate_cache()  # some answer with what they have listed before
        found = self.system.get_file_info(FileSelector(root, allow_not_found=True, recursive=recursive))
        return {info.path[len(root):].lstrip("/") if recursive else info.base_name:
                FileMark(info.size, info.mtime_ns) if info.type == FileType.File else None for info in found}

    def files(self, folder: str, *, recursive: bool = False) -> dict[str, FileMark]:
        """Return the files among the entries."""
        return {name: mark for name, mark in self.entries(folder, recursive=recursive).items() if mark is not None}

    def read(self, name: str) -> bytes | None:
        """Return a small file's bytes, None if it does not exist."""
        try:
            with self.system.open_input_file(self._path(name)) as file:
                content: bytes = file.read_at(file.size(), 0)
                return content
        except FileNotFoundError:
            return None

    def open(self, name: str) -> NativeFile:
        """Open a file to read ranges of it; FileNotFoundError if it does not exist."""
        return self.system.open_input_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if self.root and name else self.root or name


def open_tree(path: str, file_system: str) -> FileTree:
    """Open the store's folder; UsageError if the file system is not available."""
    from pyarrow.fs import FileSystem, LocalFileSystem

    if file_system not in (AUTO, ARROW):
        named = _load_file_system(file_system)
        if (fsspec := _fsspec_of(named)) is not None:
            path = fsspec._strip_protocol(path)  # as its find() spells the answers
        return FileTree(named, path.rstrip("/"))
    if not scheme_of(path):
        return FileTree(LocalFileSystem(), path)
    try:
        system, root = FileSystem.from_uri(uri_of(path))
    except (ValueError, NotImplementedError) as error:
        system, root = _by_fsspec(path, error)
    except OSError as error:
        raise _unreachable(path, str(error)) from error
    return FileTree(system, root.rstrip("/"))


def reach_tree(path: str, file_system: str) -> FileTree:
    """Open the store's folder in the driver; UsageError if a URI's file system does not answer within REACH_TIMEOUT_S."""
    if file_system not in (AUTO, ARROW) or not scheme_of(path):
        return open_tree(path, file_system)
    from pyarrow.lib import ArrowException

    found: list[FileTree | Exception] = []

    def reach() -> None:
        try:
            tree = open_tree(path, file_system)
            tree.entries("")
            found.append(tree)
        except Exception as error:  # noqa: BLE001 - raised below, in the thread that waits
            found.append(error)

    # Its library may retry for minutes in a call that cannot be interrupted: then the thread is abandoned.
    asking = threading.Thread(target=reach, name="reach", daemon=True)
    asking.start()
    asking.join(REACH_TIMEOUT_S)
    answer = found[0] if found else _unreachable(path, f"no answer within {REACH_TIMEOUT_S:g} s")
    if isinstance(answer, FileTree):
        return answer
    if isinstance(answer, (OSError, ArrowException)):
        raise _unreachable(path, str(answer)) from answer
    raise answer


def _unreachable(path: str, cause: str) -> UsageError:
    """Return the error with the first line of the cause, and advice."""
    scheme = scheme_of(uri_of(path))
    advice = _ADVICE.get(scheme, "look at its name and credentials, or mount it")
    return UsageError(f"{shown(path)} cannot be reached ({cause.partition(chr(10))[0]}): {advice}")


def _load_file_system(text: str) -> FileSystem:
    module, _, name = text.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"option fileSystem = {text!r}: {error}") from error
    return _as_file_system(found() if callable(found) else found, text)


def _by_fsspec(path: str, refused: Exception) -> tuple[FileSystem, str]:
    """Open a scheme that pyarrow does not know with fsspec, if that is installed."""
    try:
        from fsspec.core import url_to_fs

        system, root = url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{shown(path)}: pyarrow has no file system for it ({refused}), nor has fsspec ({error})") from error
    return _as_file_system(system, path), root


def _as_file_system(found: object, what: str) -> FileSystem:
    from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

    if isinstance(found, FileSystem):
        return found
    if not hasattr(found, "cat_file"):
        raise UsageError(f"{what}: {type(found).__name__} is not a file system of pyarrow or fsspec")
    return PyFileSystem(FSSpecHandler(found))


def _fsspec_of(system: FileSystem) -> Any:
    """Return the file system of fsspec behind it, or None."""
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    return system.handler.fs if isinstance(system, PyFileSystem) and isinstance(system.handler, FSSpecHandler) else None


# -- segments ----------------------------------------------------------------------


class FetchedSegment(SegmentBytes):
    """A window of the segment that begins at `start`, read from a file by ranges."""

    is_partial = True
    view: bytes

    def __init__(self, file: NativeFile, start: int) -> None:
        super().__init__(b"", start)
        self._file = file
        self._start = start

    def fill(self, first: int, upto: int, limit: int) -> int:
        """Do as SegmentBytes.fill, and drop bytes before `first`; CorruptionError if the file has become shorter."""
        upto = min(upto, limit)
        end = self.base + len(self.view)
        if not self.base <= first <= end:
            self.view, self.base, end = b"", first, first
        if end < upto:
            fetched = self._file.read_at(upto - end, end - self._start)
            if len(fetched) != upto - end:
                raise CorruptionError(f"{len(fetched)} bytes of the log were read at {end}, not {upto - end}: was its file truncated?")
            self.view = b"".join((memoryview(self.view)[first - self.base :], fetched))
            self.base = first
        return min(self.base + len(self.view), limit)

    def label(self, at: int, limit: int) -> str:
        most = TAIL_PROBE_BYTES
        while True:
            have = self.fill(at, at + most, limit)
            label = super().label(at, have)
            if have >= limit or label not in ("overrun", "range_end"):
                return label
            most = max(RECORD_PROBE_BYTES, 2 * (have - at))

    def find_record(self, first: int, end: int, limit: int) -> int | None:
        """Do as SegmentBytes.find_record; fetch little more than [first, end) and the records that may begin there."""
        at, window = first, RECORD_PROBE_BYTES
        stop = min(limit, end + _BEGIN_BYTES - 1)  # the last candidate's magic ends here
        while at + _BEGIN_BYTES <= stop:
            have = self.fill(at, min(at + window, stop), limit)
            hit = self.view.find(_MAGIC, at + MAGIC_AT - self.base, min(have, stop) - self.base)
            if hit >= 0:
                candidate = self.base + hit - MAGIC_AT
                if self._is_record(candidate, limit):
                    return candidate
                at = candidate + 1
            elif have >= stop:
                return None
            else:
                at = have - _BEGIN_BYTES + 1  # a magic may be incomplete
            window = min(2 * window, FETCH_BYTES)
        return None

    def _is_record(self, at: int, limit: int) -> bool:
        """Check a candidate like native.scan.sync: a whole record with this offset, followed by another or by the log's end."""
        if self._kind(at, at, limit) != "message":
            return False
        size_bytes, _ = BEGIN.unpack_from(self.view, at - self.base)
        following = at + size_bytes
        return limit - following < _BEGIN_BYTES or self._kind(at, following, limit) in ("message", "blank", "zeroes", "overrun")

    def _kind(self, keep: int, at: int, limit: int) -> str:
        """Do as native.scan.classify with the record's offset, fetching a record only if it has that; keep bytes from `keep` on."""
        if limit - at < _BEGIN_BYTES:
            return "range_end"
        self.fill(keep, at + _RECORD_BYTES_MIN, limit)
        size_bytes, magic = BEGIN.unpack_from(self.view, at - self.base)
        if magic != MESSAGE_MAGIC:
            return classify(self.view, at - self.base, _BEGIN_BYTES, check_crc=False)
        if size_bytes > limit - at:
            return "overrun"
        if size_bytes < _RECORD_BYTES_MIN:
            return "torn"
        if I64.unpack_from(self.view, at - self.base + PHYSICAL_OFFSET_AT)[0] != at:
            return "offset_mismatch"
        self.fill(keep, at + size_bytes, limit)
        return super().label(at, at + size_bytes)

    def walk(self, at: int, stop: int, *, limit: int, **checks: Unpack[Checks]) -> WalkResult:
        upto: int | None = min(limit, at + RECORD_PROBE_BYTES)
        records = messages = 0
        first_ms = last_ms = -1
        while upto is not None:
            have = self.fill(at, upto, limit)
            found = super().walk(at, min(stop, have), limit=have, **checks)
            at = found.end_offset
            if found.messages:
                first_ms = first_ms if messages else found.first_store_timestamp_ms
                last_ms = found.last_store_timestamp_ms
            records, messages = records + found.records, messages + found.messages
            upto = None if at >= stop else self._next_window(at, have, found.reason, limit, limit)
        return WalkResult(at, found.reason, records, messages, first_ms, last_ms)

    def scan(self, scanner: ColumnScanner, at: int, end: int, limit: int) -> Iterator[RawBatch]:
        upto: int | None = min(end, at + FETCH_BYTES)
        while upto is not None:
            have = self.fill(at, upto, limit)
            yield from super().scan(scanner, at, min(end, have), have)
            at = scanner.position
            upto = None if at >= end else self._next_window(at, have, scanner.reason, end, limit)

    def _next_window(self, at: int, have: int, reason: str, end: int, limit: int) -> int | None:
        """Return up to where to fetch for a pass to `end` that stopped at `at`: a window, but more than is available.

        None unless it stopped only because the rest was not fetched yet.
        """
        if have >= limit or reason not in ("overrun", "range_end"):
            return None
        return max(min(end, at + FETCH_BYTES), have + max(RECORD_PROBE_BYTES, have - at))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class FetchedFile:
    """A file whose slices are fetched; it caches blocks around short ones. Threads may share it."""

    def __init__(self, file: NativeFile) -> None:
        self._file = file
        self._blocks: dict[int, bytes] = {}

    def __getitem__(self, piece: slice) -> bytes:
        begin, end = piece.start, piece.stop
        if end - begin >= BLOCK_BYTES:
            return self._fetch(begin, end - begin)
        first, last = begin // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        data = b"".join(self._block(number) for number in range(first, last + 1))
        return data[begin - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def _block(self, number: int) -> bytes:
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = self._fetch(number * BLOCK_BYTES, BLOCK_BYTES)
        return block

    def _fetch(self, begin: int, length: int) -> bytes:
        fetched: bytes = self._file.read_at(length, begin)
        return fetched


def windows(segment: SegmentBytes, entries: numpy.ndarray, limit: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, limit) of runs of queue entries for records of the segment, which are then in `view` up to `limit`."""
    if not isinstance(segment, FetchedSegment):
        yield 0, len(entries), limit
        return
    offsets, sizes = (entries[name].astype(numpy.int64) for name in ("physicalOffset", "size"))
    sizes[(offsets == 0) & (sizes == CQ_FILLER_SIZE)] = 0
    for at in numpy.flatnonzero(sizes > FETCH_BYTES).tolist():  # a false size must not be fetched
        sizes[at] = _size_at(segment, int(offsets[at]), limit, int(sizes[at]))
    ends = offsets + numpy.maximum(sizes, _RECORD_BYTES_MIN)
    is_apart = (offsets[1:] < offsets[:-1]) | (offsets[1:] - ends[:-1] > GAP_BYTES)
    boundaries = [0, *(numpy.flatnonzero(is_apart) + 1).tolist(), len(entries)]
    for begin, stop in itertools.pairwise(boundaries):
        reach = numpy.maximum.accumulate(ends[begin:stop])
        at = begin
        while at < stop:
            first = min(int(offsets[at]), limit)
            end = max(at + 1, begin + int(numpy.searchsorted(reach, first + FETCH_BYTES, "right")))
            yield at, end, segment.fill(first, int(ends[at:end].max()), limit)
            at = end


def _size_at(segment: FetchedSegment, at: int, limit: int, claimed: int) -> int:
    """Return `claimed` if the record there has that size, otherwise 0."""
    if limit - at < max(claimed, _BEGIN_BYTES):
        return 0
    segment.fill(at, at + _BEGIN_BYTES, limit)
    return claimed if BEGIN.unpack_from(segment.view, at - segment.base)[0] == claimed else 0
