"""Read the log as Arrow record batches, for bulk consumers and for Spark.

The columns are those of pyengine.native.scan. Every field is nullable and has a
plain type (int32, int64, timestamp[us, UTC], string, binary), as Spark
expects of a Python data source. In text that is not UTF-8, U+FFFD replaces the invalid
bytes; a value is null only if the property is absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from pyengine.errors import CorruptionError, UsageError
from pyengine.native.scan import (
    BATCH_BYTES,
    BATCH_ROWS,
    COLUMNS,
    ColumnBuffer,
    ColumnData,
    ColumnScanner,
    RowFilter,
    column_kind,
    sync,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

OnCorrupt = Literal["fail", "skip"]
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
    return pa.RecordBatchReader.from_batches(schema(columns), batches)


class LogScanner:
    """Reads ranges of segments into record batches of one schema.

    `on_corrupt` is the action at damage below the limit: `fail` raises a
    CorruptionError with the offset; `skip` continues at the next valid record and
    adds (offset, reason, bytes) to `skipped`. With `verify_crc` a body that does not match
    its CRC is damage too.
    """

    def __init__(
        self,
        columns: Sequence[str] | None = None,
        *,
        row_filter: RowFilter | None = None,
        batch_rows: int = BATCH_ROWS,
        batch_bytes: int = BATCH_BYTES,
        verify_crc: bool = False,
        on_corrupt: OnCorrupt = "fail",
    ) -> None:
        if on_corrupt not in ("fail", "skip"):
            raise UsageError(f"on_corrupt is 'fail' or 'skip', not {on_corrupt!r}")
        self.schema = schema(columns)
        self.skipped: list[tuple[int, str, int]] = []
        self._on_corrupt = on_corrupt
        self._scanner = ColumnScanner(
            self.schema.names,
            row_filter=row_filter,
            batch_rows=batch_rows,
            batch_bytes=batch_bytes,
            verify_crc=verify_crc,
            allocate=allocate,
        )

    def scan(self, view: Buffer, base_offset: int, start: int, end: int, limit: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the records that begin in [start, end), a range of the segment in `view`.

        A record must begin at `start`. Bytes at or above `limit` (default: `end`) are not read.
        The scan ends at the segment's blank. Raises CorruptionError as `on_corrupt` says, UsageError
        when the range is not in the view.
        """
        limit = end if limit is None else limit
        length = memoryview(view).nbytes
        if not base_offset <= start <= end <= limit <= base_offset + length:
            raise UsageError(
                f"[{start}, {end}) with limit {limit} does not lie in the segment at {base_offset} of {length} bytes"
            )
        return self._scan(view, base_offset, start, end, limit)

    def _scan(self, view: Buffer, base_offset: int, start: int, end: int, limit: int) -> Iterator[pa.RecordBatch]:
        position: int | None = start
        while position is not None and position < end:
            for batch in self._scanner.scan(view, base_offset, position, end, limit):
                arrays = [to_array(column, batch.rows) for column in batch.columns]
                yield pa.RecordBatch.from_arrays(arrays, schema=self.schema)
            if self._scanner.reason in ("range_end", "blank"):  # not damage
                return
            position = self._skip_damage(view, base_offset, end, limit)

    def _skip_damage(self, view: Buffer, base_offset: int, end: int, limit: int) -> int | None:
        """Return the first record after the damage at which the scan stopped, None if there is none."""
        position, reason = self._scanner.position, self._scanner.reason
        if self._on_corrupt == "fail":
            raise CorruptionError(f"the log is damaged at {position}: {reason.replace('_', ' ')}")
        following = sync(view, base_offset, position + 1, end, limit=limit) if position + 1 < end else None
        self.skipped.append((position, reason, (end if following is None else following) - position))
        return following


def allocate(length: int) -> ColumnBuffer:
    """Allocate memory that Arrow owns, for a ColumnScanner."""
    buffer = pa.allocate_buffer(length)
    return ColumnBuffer(buffer, buffer.address)


def to_array(column: ColumnData, rows: int) -> pa.Array:
    """Return a scanned column, made with `allocate`, as an Arrow array, without a copy."""
    validity = None if column.validity is None else column.validity.owner
    buffers = [validity, column.data.owner] if column.offsets is None else [validity, column.offsets.owner, column.data.owner]
    return pa.Array.from_buffers(_TYPES[column.kind], rows, buffers, column.null_count)
