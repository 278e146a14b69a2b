"""How Spark finds the format `pyengine-queue`: it imports every module called pyspark_* and takes its DefaultSource."""

from pyengine.spark.source import PyEngineQueueSource as DefaultSource

__all__ = ["DefaultSource"]
