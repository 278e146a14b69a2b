"""Units of work run in the workers, each where there is room; what they found comes back to the driver.

A unit is a small object that says which bytes to look at; its outcome is small too. The
driver takes the outcomes in the units' order, whatever the order of the tasks.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pyengine.spark.jobs import run_in_workers, watched

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import SparkSession

_SCHEMA = "unit BIGINT, outcome BINARY"


class Unit(Protocol):
    """`cost` is about the bytes it reads. Unit and outcome are pickled; an exception of `run` is raised in the driver."""

    cost: int

    def run(self, common: Any) -> Any: ...


def run_units(spark: SparkSession, units: Sequence[Unit], common: object, *, task_bytes: int,
              progress: Callable[[int, int], None] | None = None) -> list[Any]:
    """The outcome of each unit; `common` goes to all of them. A task takes units of about `task_bytes` together.

    Units that are much smaller share a task, but every core gets one while there are units.
    """
    total = sum(unit.cost for unit in units)
    share = max(1, min(task_bytes, total // max(1, spark.sparkContext.defaultParallelism)))
    bundles = list(_bundled(units, share))
    found: list[Any] = [None] * len(units)
    with watched(spark, total, progress):
        rows = run_in_workers(spark, functools.partial(_run_bundle, common), bundles, _SCHEMA).collect() if bundles else []
    for number, outcome in rows:
        found[number] = pickle.loads(outcome)
        if isinstance(found[number], BaseException):
            raise found[number]
    return found


def _bundled(units: Iterable[Unit], most: int) -> Iterator[list[tuple[int, Unit]]]:
    bundle: list[tuple[int, Unit]] = []
    held = 0
    for number, unit in enumerate(units):
        if bundle and held + unit.cost > most:
            yield bundle
            bundle, held = [], 0
        bundle.append((number, unit))
        held += unit.cost
    if bundle:
        yield bundle


def _run_bundle(common: object, number: int, bundle: list[tuple[int, Unit]]) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow

    for at, unit in bundle:
        outcome = pickle.dumps(_outcome(unit, common))
        yield pyarrow.RecordBatch.from_arrays([pyarrow.array([at], pyarrow.int64()), pyarrow.array([outcome], pyarrow.binary())],
                                              ["unit", "outcome"])


def _outcome(unit: Unit, common: object) -> object:
    """What the unit found, or its error, told as an outcome: Spark would try it again, and bury it in a trace."""
    from pyengine.errors import EngineError

    try:
        return unit.run(common)
    except (OSError, EngineError) as error:
        return error
