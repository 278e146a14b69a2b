"""Checks a whole store with reads in the workers: `pyengine check` (storage.check), whose pieces run in the workers, in three jobs: the
segments of the log; the files of queues and index; the keys of the log, if the index must be counted.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyengine.errors import EngineError
from pyengine.spark.jobs import collect_from_workers, watched
from pyengine.storage.check.parts import CheckPiece
from pyengine.storage.check.report import CheckReport
from pyengine.storage.commit_log import Log
from pyengine.storage.config import EngineConfig, load_config

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_BYTES = 256 << 20


def verify(
    spark: SparkSession, store: str | os.PathLike[str], *, config: EngineConfig | None = None,
    acked: str | os.PathLike[str] | None = None, task_bytes: int = TASK_BYTES,
    progress: Callable[[int, int], None] | None = None, **sizes: object,
) -> CheckReport:
    """Check a whole store, with the report of `pyengine check`.

    A task reads about `task_bytes`, at least one segment or file. `sizes` (or `config`): settings that the files do not show.
    NotAStoreError, StoreBusyError, DiskError.
    """
    from pyengine.ipc.live_reader import check_now

    root = Path(store).absolute()
    config = config or load_config(root, {name: str(value) for name, value in sizes.items()})
    done_bytes = 0

    def run(pieces: Sequence[CheckPiece], log: Log) -> Iterator[Any]:
        nonlocal done_bytes
        before = done_bytes
        done_bytes += sum(piece.cost for piece in pieces)
        return iter(run_units(spark, pieces, replace(log, kept={}), task_bytes=task_bytes,
                              progress=progress and (lambda done, total: progress(before + done, before + total))))

    return check_now(root, config, None if acked is None else Path(acked), run=run)


def run_units(spark: SparkSession, pieces: Sequence[CheckPiece], log: Log, *, task_bytes: int,
              progress: Callable[[int, int], None] | None = None) -> list[Any]:
    """Return what each piece finds. A task takes pieces of about `task_bytes` together; every core gets a task while there are pieces."""
    total = sum(piece.cost for piece in pieces)
    bundles = bundled(pieces, max(1, min(task_bytes, total // max(1, spark.sparkContext.defaultParallelism))))
    with watched(spark, total, progress):
        outcomes = collect_from_workers(spark, functools.partial(run_bundle, log), bundles)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def bundled(pieces: Sequence[CheckPiece], most: int) -> list[list[CheckPiece]]:
    """Divide the pieces into tasks, of which several together cost at most `most`."""
    bundles: list[list[CheckPiece]] = []
    held = 0
    for piece in pieces:
        if not bundles or held + piece.cost > most:
            bundles.append([])
            held = 0
        bundles[-1].append(piece)
        held += piece.cost
    return bundles


def run_bundle(log: Log, number: int, bundle: list[CheckPiece]) -> Iterator[Any]:
    """Yield what each piece finds; an error as one, since Spark would retry it, and show it inside a trace."""
    for piece in bundle:
        try:
            yield piece.run(replace(log, kept={}))  # its own mappings, while the piece reads it
        except (OSError, EngineError) as error:
            yield error
