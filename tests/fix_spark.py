"""Fixtures for Spark: one session for the whole run, and jobs that run without a session."""

from __future__ import annotations

import os
import pickle
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

import pyengine
from fix_engine import SMALL


def spark_version() -> tuple[int, int]:
    """The installed version, major and minor."""
    major, minor = version("pyspark").split(".")[:2]
    return int(major), int(minor)


@pytest.fixture(scope="session")
def spark():
    """Tests that use it carry the marker spark. Spark finds the format by its name."""
    from pyspark.sql import SparkSession

    from pyengine.spark.spark_session import session

    assert SparkSession.getActiveSession() is None, "another Spark session is running"
    running = session("pyengine tests", cores=2)
    yield running
    running.stop()


def run_units_here(spark, work, common, *, task_bytes, progress=None):
    """run_units of pyengine.spark.store_verify in this process, as tasks would: pickled in bundles, the last ones first."""
    from pyengine.spark import store_verify

    found = []
    for bundle in reversed(store_verify.bundled(work, task_bytes)):
        sent = pickle.loads(pickle.dumps((common, 0, bundle)))
        found[:0] = [pickle.loads(pickle.dumps(outcome)) for outcome in store_verify.run_bundle(*sent)]
    for outcome in found:
        if isinstance(outcome, BaseException):
            raise outcome
    return found


@pytest.fixture(scope="module")
def sink_store(tmp_path_factory):
    """A store with a running engine, for tests of a module that kill none: each writes to topics of its own."""
    root = tmp_path_factory.mktemp("sink") / "store"
    with pyengine.Engine(root, **{**SMALL, "mapped_file_size_consume_queue_bytes": 60_000}):
        yield root


@pytest.fixture
def no_work_folder_stays():
    """Remove what executor processes write into `work` beside the package; they ignore every setting of that folder."""
    import pyspark

    work = Path(pyspark.__file__).parent / "work"
    if not os.access(work.parent, os.W_OK):
        pytest.skip(f"{work.parent} is not writable, and Spark's workers write there")
    before = set(work.iterdir()) if work.is_dir() else None
    yield
    for entry in [work] if before is None else [entry for entry in work.iterdir() if entry not in before]:
        shutil.rmtree(entry, ignore_errors=True)
