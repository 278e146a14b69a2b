"""The data source of `spark.read.format("pyengine")` and `spark.readStream.format("pyengine")`, and the entry to the sink.

There is no filter pushdown: Spark 4.3 reuses a filtered plan for the next query on the same DataFrame, which then returns too few
rows. Spark imports this module in every session to find the formats, so it loads Arrow and C only when they are used.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from pyengine.errors import UsageError
from pyengine.spark.options import MESSAGES, read_options
from pyengine.spark.partitions import LogRange, QueuePart
from pyengine.spark.schema import chosen_columns, columns_of_schema, schema_text, view_columns, view_options
from pyengine.spark.versions import arrow_schema_of

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

    from pyengine.spark.sink import BatchSink, StreamSink
    from pyengine.spark.stream import LogStreamReader

# Twice the default: without bodies a task reads them in the time that Spark needs to begin a few tasks.
NARROW_PART_BYTES = 512 << 20


class PyEngineSource(DataSource):
    """The commit log of one store, as a table."""

    _end: int | None = None  # of the log, for every scan of one DataFrame

    @classmethod
    def name(cls) -> str:
        return "pyengine"

    def __getstate__(self) -> dict[str, Any]:
        """Fix the end: Spark pickles the source in load(), and makes every scan of the DataFrame from that, of which a query may have
        several. With the user's schema it does so for each scan of the first query."""
        from pyengine.spark.plan import end_now

        with contextlib.suppress(Exception):  # what is wrong is said where it is planned
            self._end = end_now(read_options(self.options))
        return self.__dict__

    def schema(self) -> str:
        """Return the default columns of the view, or those of the option `columns`."""
        options = read_options(self.options, "any")
        if options.view == MESSAGES:
            return schema_text(chosen_columns(options))
        return schema_text(view_columns(view_options(self.options)))

    def reader(self, schema: StructType) -> LogReader | QueueViewReader:
        """Return the reader of the columns in `schema`: that of schema(), or the user's."""
        is_view = read_options(self.options, "any").view != MESSAGES
        given = dict(self.options)
        return QueueViewReader(schema, given) if is_view else LogReader(schema, given, self._end)

    def streamReader(self, schema: StructType) -> LogStreamReader:
        """Return the reader of a stream with the columns in `schema`."""
        from pyengine.spark.stream import LogStreamReader

        return LogStreamReader(schema, dict(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> BatchSink:
        """Return the writer of rows of `schema` into a running engine."""
        from pyengine.spark.sink import BatchSink

        return BatchSink(schema, overwrite, dict(self.options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamSink:
        """Return the writer of one batch of a stream. With `overwrite` (output mode complete) each batch puts all rows, as in Kafka."""
        from pyengine.spark.sink import StreamSink

        return StreamSink(schema, dict(self.options))


class LogReader(DataSourceReader):
    """One read: planned once in the driver, then each partition in some task."""

    def __init__(self, schema: StructType, given: dict[str, str], end: int | None = None) -> None:
        self.options = read_options(given)
        self.end = end
        self.columns = columns_of_schema(schema, self.options)
        self.schema = schema
        self._is_cut = "maxpartitionbytes" in map(str.lower, given)

    def partitions(self) -> list[LogRange | QueuePart]:
        """Return parts of the log below `end`, or the current end of the level; larger ones if no bodies are read."""
        from pyengine.spark.plan import plan

        if self._is_cut or self.options.is_remote or any(column.scanned == "body" for column in self.columns):
            return plan(self.options, end=self.end)
        return plan(self.options, NARROW_PART_BYTES, len(os.sched_getaffinity(0)), end=self.end)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of one partition, as Arrow batches of exactly the schema that Spark expects."""
        if not isinstance(partition, (LogRange, QueuePart)):  # what Spark makes of an empty list of partitions
            return iter(())
        from pyengine.spark.task_reader import read_partition

        return read_partition(self.options, self.columns, partition, arrow_schema_of(self.schema))


class OldQueueSource(DataSource):
    """Refuses the name that the views of queues had in version 0.2, with the option that replaces it."""

    @classmethod
    def name(cls) -> str:
        return "pyengine-queue"

    def schema(self) -> str:
        raise UsageError('format("pyengine-queue") is now an option of format("pyengine"): view=queue gives a row for each queue, '
                         "view=entries one for each entry, view=groups the offsets of consumer groups")


class QueueViewReader(DataSourceReader):
    """One read of a view: planned once in the driver, then each partition in some task."""

    def __init__(self, schema: StructType, given: dict[str, str]) -> None:
        self.options = view_options(given)
        wanted = [(column.name, column.type) for column in view_columns(self.options)]
        if [(field.name, field.dataType.simpleString().upper()) for field in schema.fields] != wanted:
            raise UsageError(f"view={self.options.view} takes no .schema(): name columns with the option columns")
        self.schema = schema

    def partitions(self) -> list[QueuePart]:
        """Return groups of queues, up to the current end of the level."""
        from pyengine.spark.queue_view import plan_view

        return plan_view(self.options)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of one partition."""
        from pyengine.spark.queue_view import view_rows

        if not isinstance(partition, QueuePart):  # what Spark makes of an empty list of partitions
            return iter(())
        return view_rows(self.options, partition, arrow_schema_of(self.schema))
