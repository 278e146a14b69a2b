"""The data source behind `spark.read.format("pyengine")` and `spark.readStream.format("pyengine")`.

Spark makes it in the driver's planning process, asks it for a schema and partitions, and
ships the reader to the tasks. There is no filter pushdown: Spark 4.3 keeps a filtered
plan for the next query on the same DataFrame, which then returns too few rows. Options
choose rows and columns instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from pyengine.spark.options import read_options
from pyengine.spark.partitions import LogRange, QueuePart
from pyengine.spark.plan import plan
from pyengine.spark.schema import chosen_columns, columns_of_schema, schema_text
from pyengine.spark.selection import select
from pyengine.spark.versions import arrow_schema_of

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

    from pyengine.spark.stream import LogStreamReader


class PyEngineSource(DataSource):
    """The commit log of one store, as a table."""

    @classmethod
    def name(cls) -> str:
        return "pyengine"

    def schema(self) -> str:
        """The default columns, or those that the option `columns` names."""
        return schema_text(chosen_columns(read_options(self.options, "any")))

    def reader(self, schema: StructType) -> LogReader:
        """The reader of the columns in `schema`, which is ours or the user's choice from it."""
        return LogReader(schema, dict(self.options))

    def streamReader(self, schema: StructType) -> LogStreamReader:
        """The reader of a stream of the columns in `schema`."""
        from pyengine.spark.stream import LogStreamReader

        return LogStreamReader(schema, dict(self.options))


class LogReader(DataSourceReader):
    """One read: planned once in the driver, then each partition in some task."""

    def __init__(self, schema: StructType, given: dict[str, str]) -> None:
        self.options = read_options(given)
        self.columns = columns_of_schema(schema, self.options)
        self.schema = schema

    def partitions(self) -> list[LogRange | QueuePart]:
        """Parts of the log below the level's end as it is now."""
        return plan(self.options)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """The rows of one partition, as Arrow batches of exactly the schema that Spark expects."""
        if not isinstance(partition, (LogRange, QueuePart)):  # what Spark makes of an empty list of partitions
            return iter(())
        from pyengine.spark.task_reader import read_partition

        schema = arrow_schema_of(self.schema)
        return read_partition(self.options, select(self.options), self.columns, partition, schema)
