"""The data source behind `spark.read.format("pyengine-queue")`: counts, sizes and lags from the consume queues alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from pyengine.errors import UsageError
from pyengine.spark.queue_view import QueueRows, plan_view, read_view_options, types_of, view_rows
from pyengine.spark.versions import arrow_schema_of

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType


class PyEngineQueueSource(DataSource):
    """The consume queues of one store, as a table."""

    @classmethod
    def name(cls) -> str:
        return "pyengine-queue"

    def schema(self) -> str:
        """The columns of the view, or those of them that the option `columns` names."""
        options = read_view_options(self.options)
        types = types_of(options.view)
        return ", ".join(f"`{name}` {types[name]}" for name in options.columns)

    def reader(self, schema: StructType) -> QueueViewReader:
        return QueueViewReader(schema, dict(self.options))


class QueueViewReader(DataSourceReader):
    """One read: planned once in the driver, then each partition in some task."""

    def __init__(self, schema: StructType, given: dict[str, str]) -> None:
        self.options = read_view_options(given)
        types = types_of(self.options.view)
        wanted = [(name, types[name]) for name in self.options.columns]
        if [(field.name, field.dataType.simpleString().upper()) for field in schema.fields] != wanted:
            raise UsageError("pyengine-queue takes no .schema(): name columns with the option columns")
        self.schema = schema

    def partitions(self) -> list[QueueRows]:
        """Groups of queues, up to the level's end as it is now."""
        return plan_view(self.options)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """The rows of one partition."""
        if not isinstance(partition, QueueRows):  # what Spark makes of an empty list of partitions
            return iter(())
        return view_rows(self.options, partition, arrow_schema_of(self.schema))
