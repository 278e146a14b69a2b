"""Read the log as Arrow record batches, for bulk consumers and for Spark.

The columns are those of pyengine.native.scan. Every field is nullable and has a
plain type (int32, int64, timestamp[us, UTC], string, binary), as Spark
expects of a Python data source. In text that is not UTF-8, U+FFFD replaces the invalid
bytes; a value is null only if the property is absent.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Self
from weakref import WeakSet

import pyarrow as pa
from pyarrow import compute

from pyengine.errors import CorruptionError, FormatError, UsageError
from pyengine.formats.constants import SYS_FLAG_COMPRESSED, Readable
from pyengine.formats.record import decode_properties, decompress_body
from pyengine.native.scan import (
    COLUMNS,
    ColumnBuffer,
    ColumnData,
    ColumnScanner,
    RawBatch,
    RowFilter,
    column_kind,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine.formats.sql_filter import SqlFilter

# A read needs several times the memory of a batch of decompressed bodies; these limits keep it below 256 MiB.
DECOMPRESSED_BATCH_BYTES = 8 << 20
DECOMPRESSED_BODY_BYTES_MAX = 12 << 20  # three times the largest body that RocketMQ's clients send by default
_TYPES = {
    "int32": pa.int32(),
    "int64": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "string": pa.string(),
    "binary": pa.binary(),
}


def schema(columns: Sequence[str] | None = None) -> pa.Schema:
    """Return the Arrow schema of these columns (default: all); UsageError for an unknown or repeated name."""
    names = COLUMNS if columns is None else tuple(columns)
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(f"column {repeated[0]!r} is named twice")
    return pa.schema([pa.field(name, _TYPES[column_kind(name)], nullable=True) for name in names])


def stream(columns: Sequence[str] | None, batches: Iterable[pa.RecordBatch]) -> pa.RecordBatchReader:
    """Return batches of these columns (default: all) as one Arrow stream."""
    return pa.RecordBatchReader.from_batches(schema(columns), _Batches(batches))


class _Batches:
    """The batches of a stream, until Python ends.

    Arrow's threads read ahead of a query, and a thread that is in Python, or comes there, when its interpreter ends aborts the process.
    """

    PATIENCE = 1000  # looks at the end, which a loaded machine slows down too, for threads of a query; one that is kept may have none
    CALM = 20  # looks at threads that are not in Python: one that drops a stream is there several times
    _open: ClassVar[WeakSet[_Batches]] = WeakSet()
    _threads: ClassVar[set[int]] = set()  # those that are not Python's

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches = iter(batches)
        self._is_ahead, self._is_read, self._is_over = True, False, False
        self._open.add(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pa.RecordBatch:
        thread = threading.get_ident()
        if thread not in self._threads and any(thread == each.ident for each in threading.enumerate()):  # it lists what has logged too
            self._is_ahead = False
            return next(self._batches)
        self._threads.add(thread)
        self._is_read = True
        try:
            if self._is_over:
                raise StopIteration
            return next(self._batches)
        finally:
            self._is_read = False

    @classmethod
    def end(cls) -> None:
        """Let each stream end, and wait until no thread reads one, or drops it, which runs Python too."""
        each: _Batches | None
        for each in cls._open:
            each._is_over = True
        each = None  # which would keep the last one
        looks = calm = 0  # since one was in Python; since none was, or might come
        while (cls._open or cls._threads) and calm < cls.CALM:
            is_read = any(each._is_read for each in cls._open)
            may_come = any(each._is_ahead for each in cls._open) or sys._current_frames().keys() - _threads_of_python()
            looks = 0 if is_read else looks + 1
            calm = 0 if is_read or may_come and looks < cls.PATIENCE else calm + 1
            time.sleep(0.001)

    @classmethod
    def forget(cls) -> None:
        """In a forked child, which has none of the threads that read."""
        cls._open.clear()
        cls._threads.clear()


def _threads_of_python() -> set[int | None]:
    return {each.ident for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}


atexit.register(_Batches.end)
os.register_at_fork(after_in_child=_Batches.forget)


class LogScanner:
    """Reads ranges of segments into record batches of one schema.

    `condition` is met by the properties of each row, and with `decompress` bodies are as their producers had them (see Refiner).
    """

    def __init__(self, columns: Sequence[str] | None = None, *, row_filter: RowFilter | None = None, condition: SqlFilter | None = None,
                 decompress: bool = False) -> None:
        self.schema = schema(columns)
        bodies = [at for at, name in enumerate(self.schema.names) if name == "body" and decompress]
        self._refiner = Refiner(condition, bodies, _refuse_body)
        self._scanner = ColumnScanner(tuple(dict.fromkeys([*self.schema.names, *self._refiner.needs])), row_filter=row_filter,
                                      allocate=allocate)

    def scan(self, view: Readable, base_offset: int, start: int, end: int, limit: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the records that begin in [start, end), a range of the segment in `view`, up to its blank.

        A record must begin at `start`. Bytes at or above `limit` (default: `end`) are not read. CorruptionError at
        damage, UsageError when the range is not in the view.
        """
        if start != end:
            for batch in self._scanner.scan(view, base_offset, start, end, limit):
                yield from self._refined(batch)
            self._require_end("range_end", "blank")

    def gather(self, view: Readable, base_offset: int, entries: Buffer, limit: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the records that these entries of consume queues name, all in the segment in `view`; CorruptionError for an
        entry that does not name a record below `limit`."""
        for batch in self._scanner.gather(view, base_offset, entries, limit):
            yield from self._refined(batch)
        self._require_end("range_end")

    def _require_end(self, *reasons: str) -> None:
        if self._scanner.reason not in reasons:
            raise CorruptionError(f"the log is damaged at {self._scanner.position}: {self._scanner.reason.replace('_', ' ')}")

    def _refined(self, batch: RawBatch) -> Iterator[pa.RecordBatch]:
        arrays = [to_array(column, batch.rows) for column in batch.columns]
        names = self.schema.names  # perhaps none: then another column says how many rows the batch has
        chosen = pa.RecordBatch.from_arrays([*arrays[: len(names)], pa.nulls(batch.rows)], [*names, ""]).select(names)
        yield from filter(len, self._refiner.refine(chosen, dict(zip(self._scanner.columns, arrays))))


def _refuse_body(offset: int, size_bytes: int, error: FormatError) -> None:
    raise CorruptionError(f"the body of the message at {offset} cannot be decompressed: {error} with decompress=False")


def allocate(length: int) -> ColumnBuffer:
    """Allocate memory that Arrow owns, for a ColumnScanner."""
    buffer = pa.allocate_buffer(length)
    return ColumnBuffer(buffer, buffer.address)


def to_array(column: ColumnData, rows: int) -> pa.Array:
    """Return a scanned column, made with `allocate`, as an Arrow array, without a copy."""
    validity = None if column.validity is None else column.validity.owner
    buffers = [validity, column.data.owner] if column.offsets is None else [validity, column.offsets.owner, column.data.owner]
    return pa.Array.from_buffers(_TYPES[column.kind], rows, buffers, column.null_count)


WRONG_BODY = "body is not what its compression says"


class Refiner:
    """What happens to scanned rows in Python: those that do not meet a condition are left out, and bodies are decompressed.

    `bodies` are the places of columns with bodies to decompress. `on_wrong_body` gets the physical offset and the stored bytes of a
    message whose body cannot be decompressed, and the error; it raises, or the row is left out.
    """

    def __init__(self, condition: SqlFilter | None, bodies: Sequence[int], on_wrong_body: Callable[[int, int, FormatError], None]) -> None:
        self._condition, self._bodies, self._on_wrong_body = condition, bodies, on_wrong_body
        of_condition = [] if condition is None else ["properties"]
        self.needs = (*of_condition, *(("sysFlag", "physicalOffset") if bodies else ()))

    def meets(self, properties: str) -> bool:
        """Return whether a row with these properties, as stored, meets the condition."""
        return self._condition is None or self._condition.matches(decode_properties(properties))

    def refine(self, batch: pa.RecordBatch, scanned: Mapping[str, pa.Array]) -> Iterator[pa.RecordBatch]:
        """Yield the refined rows: one batch, or several if decompressed bodies make it large. `scanned` has the columns of `needs`."""
        of_bodies = [scanned[name] for name in ("sysFlag", "physicalOffset")] if self._bodies else []
        if self._condition is not None:
            meets = pa.array([self.meets(text or "") for text in scanned["properties"].to_pylist()], pa.bool_())
            batch, of_bodies = batch.filter(meets), [array.filter(meets) for array in of_bodies]
        if self._bodies:
            flags, offsets = of_bodies
            rows = compute.indices_nonzero(compute.bit_wise_and(flags, pa.scalar(SYS_FLAG_COMPRESSED, flags.type))).to_pylist()
            if rows:
                yield from self._decompressed(batch, {row: (flags[row].as_py(), offsets[row].as_py()) for row in rows})
                return
        yield batch

    def _decompressed(self, batch: pa.RecordBatch, compressed: Mapping[int, tuple[int, int]]) -> Iterator[pa.RecordBatch]:
        """Yield the batch with decompressed bodies, in pieces of at most DECOMPRESSED_BATCH_BYTES; `compressed` has the flags and the
        offset of each row to decompress."""
        stored = batch.column(self._bodies[0])
        texts: dict[int, bytes | None] = {}
        start = size_bytes = 0
        for row, (flags, offset) in compressed.items():
            body = stored[row].as_py()
            try:
                text = content_of(body, flags)
            except FormatError as error:
                self._on_wrong_body(offset, len(body), error)
                texts[row] = None
                continue
            if size_bytes and size_bytes + len(text) > DECOMPRESSED_BATCH_BYTES:
                yield self._with_bodies(batch, start, row, texts)
                start, size_bytes = row, 0
            texts[row] = text
            size_bytes += len(text)
        yield self._with_bodies(batch, start, batch.num_rows, texts)

    def _with_bodies(self, batch: pa.RecordBatch, start: int, end: int, texts: dict[int, bytes | None]) -> pa.RecordBatch:
        """Return the rows [start, end) with these bodies, without those of None; empty `texts`."""
        is_compressed = pa.array([row in texts for row in range(start, end)], pa.bool_())
        keeps = None
        if None in texts.values():
            keeps = pa.array([texts.get(row, b"") is not None for row in range(start, end)], pa.bool_())
        bodies = pa.array(texts.values(), pa.binary())
        texts.clear()  # here, so that they are not in memory twice
        batch = batch.slice(start, end - start)
        if len(bodies) < batch.num_rows:
            bodies = compute.replace_with_mask(batch.column(self._bodies[0]), is_compressed, bodies)
        for at in self._bodies:
            batch = batch.set_column(at, batch.schema.field(at), bodies)
        return batch if keeps is None else batch.filter(keeps)


def content_of(body: bytes, sys_flag: int) -> bytes:
    """Return a message's body as its producer had it; FormatError for a compressed one that cannot be read, or has more than 12 MiB."""
    return decompress_body(body, sys_flag, _codec, DECOMPRESSED_BODY_BYTES_MAX)


def _codec(kind: str, body: bytes, most_bytes: int) -> bytes:
    """Decompress LZ4 and ZSTD frames of RocketMQ 5's clients with pyarrow, to at most `most_bytes`; OSError for other bytes."""
    with pa.CompressedInputStream(pa.BufferReader(body), kind.lower()) as stream:
        text: bytes = stream.read(most_bytes)
        return text
