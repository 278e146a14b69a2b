"""A task of a read, a job or an export stays under 256 MiB of memory of its own, whatever the bodies are."""

from __future__ import annotations

import contextlib
import importlib
import random
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pyengine.spark import collect_stats, export_parquet
from pyengine.storage.arrow import DECOMPRESSED_BODY_BYTES_MAX
from spark.logs import write_log

pytestmark = [pytest.mark.ci, pytest.mark.spark, pytest.mark.java, pytest.mark.timeout(900)]

MOST_BYTES = 256 << 20
LOG_BYTES = 320 << 20  # more than a task may hold, in one partition
SEGMENT_BYTES = 80 << 20
GIVEN = {"maxPartitionBytes": "1g", "readLevel": "committed", "mappedFileSizeCommitLog": SEGMENT_BYTES}


def small(root: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(Path(__file__).parents[2] / "bench")
        importlib.import_module("spark_data").write_log(root, LOG_BYTES, 128, SEGMENT_BYTES)


def whole(body: bytes, count: int, sys_flag: int = 0) -> Callable[[Path], object]:
    return lambda root: write_log(root, [{"topic": "T", "queue_offset": number, "body": body, "sys_flag": sys_flag}
                                         for number in range(count)], segment_bytes=SEGMENT_BYTES)


def inflating(text_bytes: int, count: int) -> Callable[[Path], object]:
    return whole(zlib.compress(b"x" * text_bytes), count, 0x1)


STORES = {
    "small": small,
    "4 MiB": whole(random.Random(1).randbytes((4 << 20) - 1000), LOG_BYTES >> 22),
    "compressed, 4 MiB": inflating(4 << 20, LOG_BYTES >> 22),
    "compressed, as much as is read": inflating(DECOMPRESSED_BODY_BYTES_MAX, LOG_BYTES // DECOMPRESSED_BODY_BYTES_MAX),
}


@contextlib.contextmanager
def own_memory() -> Iterator[list[int]]:
    """[the most bytes of private memory that a Python worker of the session had], as sampled; pages of mapped files are not its own."""
    most, over = [0], threading.Event()

    def own_bytes(process: psutil.Process) -> int:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))

    def watch() -> None:
        while not over.wait(0.005):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error, OSError):
                    if any("pyspark.daemon" in word for word in process.cmdline()):
                        most[0] = max(most[0], own_bytes(process))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield most
    finally:
        over.set()
        watcher.join()


@pytest.mark.parametrize("bodies", STORES)
def test_a_task_stays_under_256_mib(spark, tmp_path, bodies):
    root = tmp_path / "store"
    STORES[bodies](root)
    rows = spark.read.format("pyengine").options(**GIVEN)
    todo = {
        "default columns": lambda: rows.load(str(root)).write.format("noop").mode("overwrite").save(),
        "all columns": lambda: rows.options(columns="*", includeHeaders=True).load(str(root)).write.format("noop").mode("overwrite").save(),
        "statistics": lambda: collect_stats(spark, root, verifyCRC=True, **GIVEN),
        "export": lambda: export_parquet(spark, root, tmp_path / "out", **GIVEN),
        "export in folders": lambda: export_parquet(spark, root, tmp_path / "folders", partitioned=True, **GIVEN),
    }
    found = {}
    for what, work in todo.items():
        with own_memory() as most:
            work()
        found[what] = most[0] >> 20
        print(bodies, what, found[what], "MiB")
    assert 0 < min(found.values()) and max(found.values()) < MOST_BYTES >> 20, found


def test_a_body_that_would_grow_beyond_what_a_task_may_hold_is_refused_before(spark, tmp_path):
    inflating(200 << 20, 2)(tmp_path)
    with own_memory() as most, pytest.raises(Exception, match=f"more than {DECOMPRESSED_BODY_BYTES_MAX} bytes.*decompress=false"):
        spark.read.format("pyengine").options(**GIVEN).load(str(tmp_path)).write.format("noop").mode("overwrite").save()
    assert 0 < most[0] < MOST_BYTES
    rows = spark.read.format("pyengine").options(**GIVEN, decompress=False, columns="value").load(str(tmp_path)).collect()
    assert [zlib.decompress(row.value) == b"x" * (200 << 20) for row in rows] == [True, True]
