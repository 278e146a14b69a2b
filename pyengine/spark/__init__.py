"""The log as a table: `spark.read.format("pyengine").load("/path/of/store")`.

    spark = pyengine.spark.session()          # or any session: Spark finds the format by its name
    df = spark.read.format("pyengine").option("subscribe", "orders").load(store)

See docs/spark.md for columns and options. Executors need this package and the store's files, but no running engine.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pyengine.errors import UsageError, require_extra

if TYPE_CHECKING:
    from pyengine.spark.export import ExportResult, export_parquet
    from pyengine.spark.jobs import StatsRow, collect_stats, skipped_ranges, stats
    from pyengine.spark.spark_session import register, session, sql
    from pyengine.spark.store_verify import verify
    from pyengine.spark.stream import SourceMetrics, source_metrics

_WHERE = {name: f"pyengine.spark.{module}" for module, names in {
    "export": ("ExportResult", "export_parquet"), "jobs": ("StatsRow", "collect_stats", "skipped_ranges", "stats"),
    "spark_session": ("register", "session", "sql"), "store_verify": ("verify",),
    "stream": ("SourceMetrics", "source_metrics"),
}.items() for name in names}
__all__ = ["ExportResult", "SourceMetrics", "StatsRow", "collect_stats", "export_parquet", "register", "session", "skipped_ranges",
           "source_metrics", "sql", "stats", "verify"]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'pyengine.spark' has no attribute {name!r}")
    require_extra("pyspark", "pyarrow", "pandas")
    if find_spec("pyspark.sql.datasource") is None:
        installed = import_module("pyspark").__version__
        raise UsageError(f"Spark {installed} has no data sources in Python: install Spark 4.0 or later, or let it read the Parquet files "
                         "that `pyengine export` has written elsewhere")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value
