"""What differs between the versions of Spark, 4.0 to 4.3; docs/spark.md says what each cannot do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import SparkSession
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


__all__ = [
    "ReadAllAvailable", "ReadLimit", "ReadMaxBytes", "ReadMaxRows", "SupportsTriggerAvailableNow", "arrow_schema_of",
    "register_source",
]


def arrow_schema_of(schema: StructType) -> pyarrow.Schema:
    """The Arrow schema that Spark expects of batches with these columns; times are UTC's."""
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # Spark 4.0 and 4.1 know no other zone
        return to_arrow_schema(schema)


def register_source(spark: SparkSession, source: type[DataSource]) -> None:
    """Make the format known to this session, whether or not it was before."""
    from pyspark.errors import AnalysisException

    try:
        spark.dataSource.register(source)
    except AnalysisException as error:  # Spark 4.0 has found it by itself and takes no other for it
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
