"""How fast Spark reads the log, against Spark's own Parquet on the same rows.

    python bench/bench_spark.py [--log-bytes 1g] [--body-bytes 1024] [--cores 2] [--rounds 3] [--folder DIR] [--json FILE] [--page]
    python bench/bench_spark.py --plan 16,2000      what the driver takes to plan a read through so many queues
    python bench/bench_spark.py --hop               what each step between the log and the JVM costs, and designs for it

--page writes the figures into their place in bench/notes/engine.md. --keep DIR keeps log and Parquet files in DIR, and takes those
that are there; --prepare makes them and measures nothing.

MB/s are bytes of the log, whichever form is read; the page cache is hot. Both read the
same columns unless the line says otherwise. What is held against each other runs in turns,
after rounds that are not counted (a fresh JVM needs several to compile a path). `CPU s` is
what all processes of the session used in a round: on a busy machine the truer figure; `of it the JVM` is Spark's own part, the
rest is Python's workers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil
import pyarrow as pa
from pyspark.sql import SparkSession

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from measure import Row, figure, keep, show, write_into  # noqa: E402
from pyengine.ipc.crashed_engine_memory import rebuild_offline  # noqa: E402
from pyengine.ipc.live_reader import open_store  # noqa: E402
from pyengine.settings import UNITS  # noqa: E402
from pyengine.spark import export_parquet, session, stats  # noqa: E402
from pyengine.spark.options import read_options  # noqa: E402
from pyengine.spark.plan import plan  # noqa: E402
from pyengine.spark.schema import chosen_columns  # noqa: E402
from pyengine.spark.task_reader import arrow_schema, read_partition  # noqa: E402
from pyengine.storage.checkpoint import WATERMARK, DurableWatermark  # noqa: E402
from pyengine.storage.config import load_config  # noqa: E402
from pyengine.storage.config_table import TopicConfig, TopicConfigs  # noqa: E402
from spark_data import QUEUES, T0_MS, TOPICS, write_log  # noqa: E402

SEGMENT_BYTES = 256 << 20
QUEUE_FILE_BYTES = 200_000  # of plans: as many queues as are asked for have room
WARM_UP_ROUNDS = 3
PAGE = Path(__file__).resolve().parent / "notes" / "engine.md"
COLUMNS = "topic,partition,offset,physicalOffset,timestamp,bornTimestamp,tags,keys,properties,value"


def size(text: str) -> int:
    unit = text[-1].lower() if text[-1].isalpha() else ""
    return int(text[: len(text) - len(unit)]) * UNITS["bytes"][unit]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--log-bytes", type=size, default=1 << 30)
    arguments.add_argument("--body-bytes", type=int, default=1024)
    arguments.add_argument("--cores", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--page", action="store_true")
    arguments.add_argument("--keep", type=Path, metavar="DIR")
    arguments.add_argument("--prepare", action="store_true")
    only = arguments.add_mutually_exclusive_group()
    only.add_argument("--plan", type=lambda text: list(map(int, text.split(","))), metavar="QUEUES,...")
    only.add_argument("--hop", action="store_true")
    asked = arguments.parse_args()
    if asked.prepare and not asked.keep:
        arguments.error("--prepare needs --keep DIR")
    folder = asked.keep or Path(tempfile.mkdtemp(prefix="bench-spark-", dir=asked.folder))
    try:
        if asked.plan:
            name, lines = "plans", plans(asked, folder)
        elif asked.hop:
            name, lines = "the Arrow hop", hop(asked, folder)
        else:
            rows = measure(asked, folder)
            if not rows:
                return
            show(rows)
            if asked.json:
                keep(rows, asked.json)
            name, lines = f"{asked.body_bytes} bytes", table(asked, rows)
        print(lines)
        if asked.page:
            write_into(PAGE, f"figures of {name}", "bench/bench_spark.py", lines)
    finally:
        if not asked.keep:
            shutil.rmtree(folder, ignore_errors=True)


def machine(asked: argparse.Namespace) -> str:
    return (f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPUs, `local[{asked.cores}]`, Spark {version('pyspark')}, "
            f"load {os.getloadavg()[0]:.1f} at the end")


def table(asked: argparse.Namespace, rows: list[Row]) -> str:
    """The rows as lines of a page."""
    lines = [f"{asked.log_bytes / 1e6:,.0f} MB of log, bodies of {asked.body_bytes:,} bytes, median of {asked.rounds} rounds; "
             f"{machine(asked)}:", "", "| | MB of log a second | CPU s | of it the JVM | held against | ratio | floor |", "|---" * 7 + "|"]
    for row in rows:
        ratio, floor = figure(row.ratio), figure(row.floor)
        verdict = f"{floor}, {row.verdict}" if floor else ""
        cpu_s, of_jvm_s = figure(row.notes["CPU s"]), figure(row.notes["of it the JVM"])
        lines.append(f"| {row.question} | {figure(row.median)} | {cpu_s} | {of_jvm_s} | {row.limit_is} | {ratio} | {verdict} |")
    return "\n".join(lines) + "\n"


def prepared(asked: argparse.Namespace, folder: Path) -> tuple[Path, Path, SparkSession]:
    """The store, the Parquet files of its rows, and the session; made unless a run before has kept them."""
    store, native = folder / "store", folder / "native.parquet"
    if not store.exists():
        messages = write_store(store, asked)
        print(f"{messages:,} messages of {asked.body_bytes} bytes", file=sys.stderr)
    return store, native, session("bench", cores=asked.cores)


def write_store(store: Path, asked: argparse.Namespace, topics: int = TOPICS, **settings: int) -> int:
    """Log, queues and watermark as an engine leaves them, so that no plan need walk the log for its end; the number of messages."""
    messages = write_log(store, asked.log_bytes, asked.body_bytes, min(SEGMENT_BYTES, asked.log_bytes), topics=topics)
    rebuild_offline(store, load_config(store, settings))
    with open_store(store, **settings) as reader:
        end = reader.max_physical_offset()
    WATERMARK.path(store).parent.mkdir(exist_ok=True)
    WATERMARK.write(store, DurableWatermark(uuid.uuid4().hex, 1, end))
    return messages


def measure(asked: argparse.Namespace, folder: Path) -> list[Row]:
    store, native, spark = prepared(asked, folder)
    log_bytes = sum(part.log_bytes for part in plan(read_options({"path": str(store)})))
    rows: dict[str, Row] = {}

    def log(**options: str):
        return spark.read.format("pyengine").options(**options).load(str(store))

    def noop(df) -> None:
        df.write.format("noop").mode("overwrite").save()

    def once(work: Callable[[], object]) -> tuple[float, float, float]:
        """(MB/s, CPU seconds, those of the JVM)."""
        of_jvm_s = jvm_cpu_s()
        wall_s, cpu_s = spent(work)
        return log_bytes / wall_s / 1e6, cpu_s, jvm_cpu_s() - of_jvm_s

    def enter(what: str, seen: list[tuple[float, float, float]], against: str = "", floor: float | None = None,
              aim: float | None = None) -> None:
        limit = rows[against].median if against else None
        notes = {"CPU s": median(cpu_s for _, cpu_s, _ in seen), "of it the JVM": median(of_jvm_s for *_, of_jvm_s in seen)}
        if against:
            notes["CPU s of the limit, as a ratio"] = rows[against].notes["CPU s"] / notes["CPU s"]
        rows[what] = Row(what, "MB/s", [rate for rate, *_ in seen], limit, against, floor, aim, notes=notes)
        print(f"{what}: {rows[what].median:,.0f} MB/s", file=sys.stderr, flush=True)

    def timed(what: str, work: Callable[[], object], against: str = "", rounds: int | None = None,
              floor: float | None = None, aim: float | None = None) -> None:
        for _ in range(0 if rounds else WARM_UP_ROUNDS):
            work()
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

    noop(log(columns="offset"))  # a session's first job pays for all
    if not (native / "_SUCCESS").exists():
        timed("Parquet, written by the JVM", lambda: log(columns=COLUMNS).write.mode("overwrite").parquet(str(native)), rounds=1)
    if asked.prepare:
        spark.stop()
        return []
    timed("scan into columns, one process, no Spark", lambda: scan(store))
    parquet = spark.read.parquet(str(native))
    ends = ends_of_times(store)
    in_turns("Parquet, full read", lambda: noop(parquet), "log, full read", lambda: noop(log(columns=COLUMNS)),
             0.8 if asked.body_bytes < 1024 else 1.0)
    timed("log, full read of the default columns", lambda: noop(log()), "Parquet, full read", floor=1.0)
    in_turns("Parquet, sum(length(value))", lambda: parquet.selectExpr("sum(length(value))").collect(),
             "log, sum(length(value))", lambda: log(columns="value").selectExpr("sum(length(value))").collect())
    in_turns("Parquet, count by topic", lambda: parquet.groupBy("topic").count().collect(),
             "log, count by topic", lambda: log(columns="topic").groupBy("topic").count().collect(), 1.0)
    timed("log, stats in the workers", lambda: stats(spark, store).collect(), "Parquet, count by topic", floor=1.0)
    timed("log, stats with every checksum verified", lambda: stats(spark, store, verifyCRC=True).collect())
    for what, given in {"one topic of sixteen": {"subscribe": "topic-003"}, "one tag of five": {"tags": "tag1"},
                        "a tenth of the time": ends, "one topic and tag of eighty": {"subscribe": "topic-003", "tags": "tag1"}}.items():
        timed(f"log, {what}, by options", lambda: noop(log(columns=COLUMNS, **given)), "Parquet, full read", floor=5.0)
    timed("export in the workers, snappy", exported("snappy"), floor=1000)
    timed("export in the workers, zstd", exported("zstd"), rounds=1)
    spark.stop()
    return list(rows.values())


def plans(asked: argparse.Namespace, folder: Path) -> str:
    """Lines of a page: plans of `access=queue` for stores with so many queues, with and without the search for lost messages."""

    def taken(store: Path, **given: str) -> Spent:
        """The least of both, of several plans."""
        options = read_options({"path": str(store), "subscribePattern": "topic.*", "access": "queue",
                                "mappedFileSizeConsumeQueue": str(QUEUE_FILE_BYTES), **given})
        found = []
        for _ in range(asked.rounds + 1):
            began_s, begun_cpu_s = time.perf_counter(), time.process_time()
            plan(options)
            found.append((time.perf_counter() - began_s, time.process_time() - begun_cpu_s))
        return min(wall_s for wall_s, _ in found), min(cpu_s for _, cpu_s in found)

    lines = [f"{asked.log_bytes / 1e6:,.0f} MB of log with bodies of {asked.body_bytes:,} bytes in the page cache, the least of "
             f"{asked.rounds + 1} plans; {machine(asked)}. Milliseconds, and of CPU:", "",
             "| queues | whole plan | without the search for lost messages | with a queue that has no message |", "|---" * 4 + "|"]
    for queues in asked.plan:
        store, topics = folder / f"{queues}-queues", queues // QUEUES
        write_store(store, asked, topics, mapped_file_size_consume_queue_bytes=QUEUE_FILE_BYTES)
        configs = TopicConfigs(store)
        for number in range(topics):
            configs.create(TopicConfig(f"topic-{number:03d}", read_queue_nums=QUEUES, write_queue_nums=QUEUES))
        found = [taken(store), taken(store, failOnDataLoss="false")]
        configs.create(TopicConfig("topic-unused", read_queue_nums=1, write_queue_nums=1))
        found.append(taken(store))
        lines.append(f"| {queues:,} | " + " | ".join(f"{figure(wall_s * 1e3)}, {figure(cpu_s * 1e3)}" for wall_s, cpu_s in found) + " |")
        shutil.rmtree(store)
    return "\n".join(lines) + "\n"


def session_cpu_s() -> float:
    """Processor seconds of this process, the JVM and its workers so far."""
    me = psutil.Process()
    return sum(map(cpu_s_of, (me, *me.children(recursive=True))))


def jvm_cpu_s() -> float:
    """Those of the JVM alone."""
    return sum(cpu_s_of(process) for process in psutil.Process().children() if process.name() == "java")


def cpu_s_of(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def scan(store: Path) -> None:
    """The whole log through the reader that the tasks use, in this process."""
    for _ in scanned(store, COLUMNS):
        pass


def scanned(store: Path, columns: str, **given: str) -> Iterator[pa.RecordBatch]:
    options = read_options({"path": str(store), "columns": columns, **given})
    chosen = chosen_columns(options)
    for part in plan(options):
        yield from read_partition(options, chosen, part, arrow_schema(chosen))


def ends_of_times(store: Path) -> dict[str, str]:
    """Options for a tenth of the log's time, out of its middle."""
    messages = sum(batch.num_rows for batch in scanned(store, "size"))
    last_ms = messages // 100  # spark_data stores a hundred messages a millisecond
    return {"startingTimestamp": str(T0_MS + last_ms * 45 // 100), "endingTimestamp": str(T0_MS + last_ms * 55 // 100)}


Spent = tuple[float, float]  # seconds, CPU seconds


def spent(work: Callable[[], object]) -> Spent:
    cpu_s, begun = session_cpu_s(), time.perf_counter()
    work()
    return time.perf_counter() - begun, session_cpu_s() - cpu_s


def hop(asked: argparse.Namespace, folder: Path) -> str:
    """Lines of a page: what each step of a full read costs for a GB of log, and the read with other designs of the hop."""
    store, _, spark = prepared(asked, folder)
    log_bytes = sum(part.log_bytes for part in plan(read_options({"path": str(store)})))

    def read(**given: str) -> Callable[[], object]:
        return lambda: spark.read.format("pyengine").options(columns=COLUMNS, **given).load(str(store)).write.format("noop").mode(
            "overwrite").save()

    def sent(**given: str) -> None:
        """Each batch as Spark's worker sends it, to a thread that reads the bytes and drops them."""
        ours, theirs = socket.socketpair()
        taker = threading.Thread(target=lambda: [None for _ in iter(lambda: theirs.recv(1 << 20), b"")])
        taker.start()
        with ours, ours.makefile("wb", 65536) as out:
            writer = None
            for batch in scanned(store, COLUMNS, **given):
                writer = writer or pa.ipc.new_stream(out, batch.schema)
                writer.write_batch(batch)
            if writer is not None:
                writer.close()
        taker.join()
        theirs.close()

    def line(what: str, work: Callable[[], object], warm_up_rounds: int = 0) -> str:
        for _ in range(warm_up_rounds):
            work()
        taken = [spent(work) for _ in range(asked.rounds)]
        wall_s, cpu_s = (median(one[at] for one in taken) / log_bytes * 1e9 for at in (0, 1))
        print(what, figure(wall_s), figure(cpu_s), file=sys.stderr, flush=True)
        return f"| {what} | {figure(wall_s)} | {figure(cpu_s)} |"

    lines = [f"Bodies of {asked.body_bytes:,} bytes, {log_bytes / 1e6:,.0f} MB of log, the ten columns, median of {asked.rounds} rounds; "
             f"{machine(asked)}:", "", "| for a GB of log | s | CPU s |", "|---|---|---|",
             line("the log into Arrow columns, one process", lambda: scan(store)),
             line("... and as a stream of Arrow into a socket, read and dropped", sent),
             line("the whole read into Spark", read(), WARM_UP_ROUNDS)]
    lines += [line(f"... with {', '.join(f'`{name}={value}`' for name, value in given.items())}", read(**given), 1)
              for given in ({"batchRows": "1000"}, {"batchBytes": "1m"}, {"batchBytes": "16m", "batchRows": "100000"})]
    spark.stop()
    for name, value in (("spark.python.unix.domain.socket.enabled", "true"), ("spark.buffer.size", "1048576")):
        spark = session("bench", cores=asked.cores, settings={name: value})
        lines.append(line(f"... in a session with `{name}={value}`", read(), WARM_UP_ROUNDS))
        spark.stop()
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
