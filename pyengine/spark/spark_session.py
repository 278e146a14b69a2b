"""A Spark session fit for this data source, and the source's registration.

Spark finds the formats `pyengine` and `pyengine-queue` by themselves through the modules
`pyspark_pyengine` and `pyspark_pyengine_queue`;
`register` is for sessions that shall not look for modules, `session` for scripts.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pyengine
from pyengine.errors import UsageError
from pyengine.spark.java import HINT, find_java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> SparkSession:
    """Make the formats `pyengine` and `pyengine-queue` known to this session, and return it. A second call does nothing."""
    from pyengine.spark.source import PyEngineQueueSource, PyEngineSource
    from pyengine.spark.versions import register_source

    register_source(spark, PyEngineSource)
    register_source(spark, PyEngineQueueSource)
    return spark


def session(app: str = "pyengine", cores: int | None = None, settings: Mapping[str, str] | None = None) -> SparkSession:
    """Return the running session, or a new one on this host: `cores` (default: all), loopback only, no web page.

    PYENGINE_SPARK_MASTER in the environment names another master; `settings` replace the defaults. Times are UTC;
    Python workers use this Python. UsageError without Java 17 or later.
    """
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is not None:
        return register(running)
    builder = SparkSession.builder.appName(app)
    for name, value in {**default_settings(cores), **(settings or {})}.items():
        builder = builder.config(name, value)
    with _environment_of_jvm():
        spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel((settings or {}).get("spark.log.level", "ERROR"))
    return register(spark)


@contextlib.contextmanager
def borrowed_session(app: str, settings: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """The running session, or a new one that ends with the block (`settings` as for `session`)."""
    from pyspark.sql import SparkSession

    was_running = SparkSession.getActiveSession() is not None
    spark = session(app, settings=settings)
    try:
        yield spark
    finally:
        if not was_running:
            spark.stop()


def default_settings(cores: int | None = None) -> dict[str, str]:
    """What `session` sets: measured on small hosts, where a session is short and data is local."""
    count = cores or len(os.sched_getaffinity(0))
    return {
        "spark.master": os.environ.get("PYENGINE_SPARK_MASTER") or f"local[{count}]",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(2 * count),
    }


@contextlib.contextmanager
def _environment_of_jvm() -> Iterator[None]:
    """What the JVM and its workers take from the environment: Java, Python, the loopback address, where this package is."""
    home = find_java_home()
    if home is None:
        raise UsageError(HINT)
    package = str(Path(pyengine.__file__).resolve().parent.parent)
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    wanted = {
        "JAVA_HOME": str(home),
        "SPARK_LOCAL_IP": os.environ.get("SPARK_LOCAL_IP", "127.0.0.1"),
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
