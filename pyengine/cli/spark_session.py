"""What the commands share whose work Spark's workers do, or may do: --spark, --master, --level, and the session."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyengine.config import FIXED_NAMES, load_config
from pyengine.errors import require_extra
from pyengine.results import ReadLevel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

master_option = click.option(
    "--master", default=None, metavar="URL",
    help="Spark's master: local[N], or a cluster's that sees the store's files under the same path. "
         "All processors of this host if not given.")

spark_option = click.option(
    "--spark", "on_spark", is_flag=True, help="Let Spark's workers do the reading; --master alone means it too.")
level_option = click.option(
    "--level", type=click.Choice([level.value for level in ReadLevel]), default=None,
    help="How far to read; flushed if not given.")


@contextlib.contextmanager
def spark_session(app: str, master: str | None = None) -> Iterator[SparkSession]:
    """A session that ends with the block. UsageError without Spark and what it needs."""
    require_extra("pyspark", "pyarrow", "pandas")
    from pyengine.spark.spark_session import borrowed_session

    with borrowed_session(app, {} if master is None else {"spark.master": master}) as spark:
        yield spark


def size_options(root: Path, settings: dict[str, str]) -> dict[str, str]:
    """The sizes that the store's files depend on, as options of a job."""
    config = load_config(root, settings)
    return {name: str(getattr(config, name)) for name in FIXED_NAMES}
