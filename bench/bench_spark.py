"""How fast Spark reads the log, against Spark's own Parquet on the same rows.

    python bench/bench_spark.py [--log-bytes 1g] [--body-bytes 1024] [--cores 2] [--rounds 3] [--folder DIR] [--json FILE]
    python bench/bench_spark.py --plan QUEUES       the driver's CPU time for the plan of a read through so many queues, no more

MB/s are bytes of the log, whichever form is read; the page cache is hot. Both read the
same columns unless the line says otherwise. What is held against each other runs in turns,
after rounds that are not counted (a fresh JVM needs several to compile a path). `CPU s` is
what all processes of the session used in a round: on a busy machine the truer figure.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import psutil
import pyarrow as pa

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from measure import Row, keep, show  # noqa: E402
from pyengine.formats.consume_queue import pack_entry  # noqa: E402
from pyengine.formats.paths import StorePaths, segment_name  # noqa: E402
from pyengine.ipc.live_reader import open_store  # noqa: E402
from pyengine.settings import BYTE_UNITS  # noqa: E402
from pyengine.spark import export_parquet, session, stats  # noqa: E402
from pyengine.spark.options import read_options  # noqa: E402
from pyengine.spark.partitions import select  # noqa: E402
from pyengine.spark.plan import plan  # noqa: E402
from pyengine.spark.schema import chosen_columns  # noqa: E402
from spark_data import write_log  # noqa: E402

SEGMENT_BYTES = 256 << 20
WARM_UP_ROUNDS = 3
COLUMNS = "topic,partition,offset,physicalOffset,timestamp,bornTimestamp,tags,keys,properties,value"


def size(text: str) -> int:
    unit = text[-1].lower() if text[-1].isalpha() else ""
    return int(text[: len(text) - len(unit)]) * BYTE_UNITS[unit]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--log-bytes", type=size, default=1 << 30)
    arguments.add_argument("--body-bytes", type=int, default=1024)
    arguments.add_argument("--cores", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--plan", type=int, metavar="QUEUES")
    asked = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-spark-", dir=asked.folder))
    try:
        if asked.plan:
            print(f"plan of {asked.plan:,} queues: {planning(asked.plan, asked.rounds, folder) * 1000:.0f} ms of CPU")
            return
        rows = measure(asked, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(rows)
    if asked.json:
        keep(rows, asked.json)


def measure(asked: argparse.Namespace, folder: Path) -> list[Row]:
    store, native = folder / "store", folder / "native.parquet"
    messages = write_log(store, asked.log_bytes, asked.body_bytes, min(SEGMENT_BYTES, asked.log_bytes))
    spark = session("bench", cores=asked.cores)
    log_bytes = sum(part.log_bytes for part in plan(read_options({"path": str(store)})))
    rows: dict[str, Row] = {}

    def log(**options: str):
        return spark.read.format("pyengine").options(**options).load(str(store))

    def noop(df) -> None:
        df.write.format("noop").mode("overwrite").save()

    def once(work: Callable[[], object]) -> tuple[float, float]:
        """(MB/s, CPU seconds)."""
        cpu_s, begun = session_cpu_s(), time.perf_counter()
        work()
        return log_bytes / (time.perf_counter() - begun) / 1e6, session_cpu_s() - cpu_s

    def enter(what: str, seen: list[tuple[float, float]], against: str = "", floor: float | None = None,
              aim: float | None = None) -> None:
        limit = rows[against].median if against else None
        notes = {"CPU s": median(cpu_s for _, cpu_s in seen)}
        if against:
            notes["CPU s of the limit, as a ratio"] = rows[against].notes["CPU s"] / notes["CPU s"]
        rows[what] = Row(what, "MB/s", [rate for rate, _ in seen], limit, against, floor, aim, notes=notes)
        print(f"{what}: {rows[what].median:,.0f} MB/s", file=sys.stderr, flush=True)

    def timed(what: str, work: Callable[[], object], against: str = "", rounds: int | None = None,
              floor: float | None = None, aim: float | None = None) -> None:
        enter(what, [once(work) for _ in range(rounds or asked.rounds)], against, floor, aim)

    def in_turns(limit: str, limit_work: Callable[[], object], what: str, work: Callable[[], object],
                 floor: float | None = None, aim: float | None = None) -> None:
        for _ in range(WARM_UP_ROUNDS):
            limit_work()
            work()
        seen = [(once(limit_work), once(work)) for _ in range(asked.rounds)]
        enter(limit, [first for first, _ in seen])
        enter(what, [second for _, second in seen], limit, floor, aim)

    def exported(compression: str) -> Callable[[], object]:
        return lambda: export_parquet(spark, store, folder / "out", compression=compression, overwrite=True, columns=COLUMNS)

    print(f"{messages:,} messages of {asked.body_bytes} bytes, {log_bytes / 1e6:,.0f} MB of log, local[{asked.cores}]")
    noop(log(columns="offset"))  # a session's first job pays for all
    timed("scan into columns, one process, no Spark", lambda: scan(store))
    timed("Parquet, written by the JVM", lambda: log(columns=COLUMNS).write.mode("overwrite").parquet(str(native)), rounds=1)
    parquet = spark.read.parquet(str(native))
    in_turns("Parquet, full read", lambda: noop(parquet), "log, full read", lambda: noop(log(columns=COLUMNS)), 0.8, 1.0)
    timed("log, full read of the default columns", lambda: noop(log()), "Parquet, full read")
    in_turns("Parquet, sum(length(value))", lambda: parquet.selectExpr("sum(length(value))").collect(),
             "log, sum(length(value))", lambda: log(columns="value").selectExpr("sum(length(value))").collect())
    in_turns("Parquet, count by topic", lambda: parquet.groupBy("topic").count().collect(),
             "log, count by topic", lambda: log(columns="topic").groupBy("topic").count().collect())
    timed("log, stats in the workers", lambda: stats(spark, store).collect(), "Parquet, count by topic")
    timed("log, stats with every checksum verified", lambda: stats(spark, store, verifyCRC=True).collect())
    timed("log, one topic and tag of eighty, by options",
          lambda: noop(log(subscribe="topic-003", tags="tag1", columns=COLUMNS)), "Parquet, full read")
    timed("export in the workers, snappy", exported("snappy"), floor=400, aim=800)
    timed("export in the workers, zstd", exported("zstd"), "Parquet, written by the JVM", rounds=1)
    spark.stop()
    return list(rows.values())


def planning(queues: int, rounds: int, store: Path) -> float:
    """CPU seconds of the fastest plan of `access=queue` for a store without a watermark that has so many queues of one entry."""
    write_log(store, 400 * queues, 128, 1 << 24)
    with open_store(store, mapped_file_size_consume_queue_bytes=20_000) as reader:
        found = pa.Table.from_batches(reader.scan(columns=["physicalOffset", "size"])).slice(0, queues).to_pydict()
    for number, named in enumerate(zip(found["physicalOffset"], found["size"], strict=True)):
        file = StorePaths(store).queue_folder(f"t{number // 4}", number % 4) / segment_name(0)
        file.parent.mkdir(parents=True)
        file.write_bytes(pack_entry(*named, 0).ljust(20_000, b"\0"))
    options = read_options({"path": str(store), "subscribePattern": "t.*", "access": "queue", "mappedFileSizeConsumeQueue": "20000"})
    taken = []
    for _ in range(rounds + 1):
        began_s = time.process_time()
        parts = plan(options)
        taken.append(time.process_time() - began_s)
    assert sum(len(part.slices) for part in parts) == queues
    return min(taken)


def session_cpu_s() -> float:
    """Processor seconds of this process, the JVM and its workers so far."""
    used = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        used += times.user + times.system
    return used


def scan(store: Path) -> None:
    """The whole log through the reader that the tasks use, in this process."""
    from pyengine.spark.task_reader import arrow_schema, read_partition

    options = read_options({"path": str(store), "columns": COLUMNS})
    chosen = chosen_columns(options)
    for part in plan(options):
        for _ in read_partition(options, select(options), chosen, part, arrow_schema(chosen)):
            pass


if __name__ == "__main__":
    main()
