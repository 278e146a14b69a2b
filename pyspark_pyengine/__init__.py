"""How Spark finds the format `pyengine`: it imports every module called pyspark_* and takes its DefaultSource."""

from pyengine.spark.source import PyEngineSource as DefaultSource

__all__ = ["DefaultSource"]
