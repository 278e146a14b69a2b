"""Spark looks each format's name up in a module of its own: this one refuses `pyengine-queue`, now the option `view` of `pyengine`."""

from pyengine.spark.source import OldQueueSource as DefaultSource

__all__ = ["DefaultSource"]
