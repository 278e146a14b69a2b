"""What differs between the versions of Spark, 4.0 to 4.3; docs/spark.md says what each cannot do."""

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
except ImportError:  # Spark 4.0 and 4.1 have no bounds for a batch and ask for none

    class ReadLimit:  # type: ignore[no-redef]
        """How much a batch may have."""

    class ReadAllAvailable(ReadLimit):  # type: ignore[no-redef]
        """Everything."""

    @dataclass(frozen=True)
    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        """So many rows."""

        max_rows: int

    @dataclass(frozen=True)
    class ReadMaxBytes(ReadLimit):  # type: ignore[no-redef]
        """So many bytes."""

        max_bytes: int

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Spark itself asks once how far there is something, and stops there."""

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamArrowWriter
except ImportError:  # Spark 4.0 gives the writer of a stream rows
    from pyspark.sql.datasource import DataSourceStreamWriter as StreamArrowWriter  # type: ignore[assignment]

__all__ = [
    "ReadAllAvailable", "ReadLimit", "ReadMaxBytes", "ReadMaxRows", "StreamArrowWriter", "SupportsTriggerAvailableNow",
    "arrow_batches", "arrow_schema_of", "register_source",
]
_ROWS = 1000  # of a batch that is made of rows


def arrow_schema_of(schema: StructType) -> pyarrow.Schema:
    """The Arrow schema that Spark expects of batches with these columns; times are UTC's."""
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # Spark 4.0 and 4.1 know no other zone
        return to_arrow_schema(schema)


def arrow_batches(items: Iterator[Any], schema: StructType) -> Iterator[pyarrow.RecordBatch]:
    """Record batches as they are, and Spark 4.0's rows of `schema` as record batches."""
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
    """A value of a Row as pyarrow takes it: a struct as a dict."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.asDict() if hasattr(value, "asDict") else value


def register_source(spark: SparkSession, source: type[DataSource]) -> None:
    """Make the format known to this session, whether or not it was before."""
    from pyspark.errors import AnalysisException

    try:
        spark.dataSource.register(source)
    except AnalysisException as error:  # Spark 4.0 has found it by itself and takes no other for it
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
