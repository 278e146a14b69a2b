"""One Spark session for the whole run; it takes some seconds to start."""

from __future__ import annotations

from importlib.metadata import version

import pytest


def spark_version() -> tuple[int, int]:
    """Of the package: docs/spark.md tells what each cannot do."""
    major, minor = version("pyspark").split(".")[:2]
    return int(major), int(minor)


@pytest.fixture(scope="session")
def spark():
    """Tests that use it carry the marker spark. The format is found by itself, not registered."""
    from pyspark.sql import SparkSession

    from pyengine.spark.spark_session import session

    assert SparkSession.getActiveSession() is None, "another Spark session is running"
    running = session("pyengine tests", cores=2)
    yield running
    running.stop()
