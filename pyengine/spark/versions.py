"""Hides the differences between Spark 4.0 and 4.3; docs/spark.md says what each version cannot do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import Row, SparkSession
    from pyspark.sql.datasource import DataSource
    from pyspark.sql.types import StructType

try:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:  # Spark 4.0 and 4.1 have no limits of a batch

    class ReadLimit:  # type: ignore[no-redef]
        """The limit of a batch."""

    class ReadAllAvailable(ReadLimit):  # type: ignore[no-redef]
        """No limit."""

    @dataclass(frozen=True)
    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        """A limit in rows."""

        max_rows: int

    @dataclass(frozen=True)
    class ReadMaxBytes(ReadLimit):  # type: ignore[no-redef]
        """A limit in bytes."""

        max_bytes: int

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Spark itself asks once for the end, and stops there."""

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamArrowWriter
except ImportError:  # Spark 4.0 passes rows to the writer of a stream
    from pyspark.sql.datasource import DataSourceStreamWriter as StreamArrowWriter  # type: ignore[assignment]

__all__ = [
    "ReadAllAvailable", "ReadLimit", "ReadMaxBytes", "ReadMaxRows", "StreamArrowWriter", "SupportsTriggerAvailableNow",
    "arrow_batches", "arrow_schema_of", "register_source",
]
_ROWS = 1000  # of a batch that is made of rows


def arrow_schema_of(schema: StructType) -> pyarrow.Schema:
    """Return the Arrow schema that Spark expects of batches with these columns; times are in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # Spark 4.0 and 4.1 know no other zone
        return to_arrow_schema(schema)


def arrow_batches(items: Iterator[Any], schema: StructType) -> Iterator[pyarrow.RecordBatch]:
    """Yield record batches as they are, and Spark 4.0's rows of `schema` as record batches."""
    import pyarrow

    for first in items:
        if isinstance(first, pyarrow.RecordBatch):
            yield first
            continue
        rows: list[Row] = [first, *itertools.islice(items, _ROWS - 1)]
        arrow = arrow_schema_of(schema)
        columns = [[_plain(row[place]) for row in rows] for place in range(len(arrow))]
        yield pyarrow.record_batch([pyarrow.array(column, field.type) for column, field in zip(columns, arrow)], schema=arrow)


def _plain(value: Any) -> Any:
    """Convert a value of a Row for pyarrow: a struct to a dict."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.asDict() if hasattr(value, "asDict") else value


def register_source(spark: SparkSession, source: type[DataSource]) -> None:
    """Register the format in this session, even if it is registered already."""
    from pyspark.errors import AnalysisException

    try:
        spark.dataSource.register(source)
    except AnalysisException as error:  # Spark 4.0 has found it by itself and accepts no other one
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
