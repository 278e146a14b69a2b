"""A stream, a sink and an export on two executors, while one process of each kind is killed alone: every message once.

test_stream_crash, test_sink_crash and test_s3 kill a driver with all that it has started. Here its other processes outlive it, or
it outlives them. Where the job ends with the process it says so, and another run of it finishes what is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import psutil
import pytest
from pyarrow import parquet

import pyengine
from fix_spark import spark_version
from fix_store_builder import StoreBuilder
from pyengine.spark.export import SUCCESS
from spark import test_sink_crash, test_stream_crash
from spark.logs import rows
from spark.test_sink import bodies
from spark.test_stream_crash import Driver, batches
from waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.java, pytest.mark.timeout(2400)]

BOUNDED = pytest.mark.skipif(spark_version() < (4, 2), reason="before Spark 4.2 a batch has all that there is: there is no between")
MASTER = "local-cluster[2,1,1024]"
EXPORT = """
import sys
from pyengine.spark import export_parquet, session
store, out = sys.argv[1:3]
spark = session("export", cores=2)
export_parquet(spark, store, out, incremental=True, columns="physicalOffset,offset,value", maxPartitionBytes=4096)
spark.stop()
"""
# What is killed, and how its command line is known among the processes that the driver has started.
COMMANDS = {"JVM": "org.apache.spark.deploy.SparkSubmit", "executor": "org.apache.spark.executor.CoarseGrainedExecutorBackend",
            "Python worker": "pyspark.worker", "stream's reader": "pyspark.sql.streaming.python_streaming_source_runner"}
ENDING = ("driver", "JVM", "stream's reader")  # what a job does not outlive
KILLED = ("driver", "JVM", "executor", "Python worker", "engine")


@pytest.fixture
def on_two_executors(monkeypatch, no_work_folder_stays):
    monkeypatch.setenv("PYENGINE_SPARK_MASTER", MASTER)


def without_java(complaints: str) -> str:
    """Return what a driver said, without where in the JVM it was."""
    return "\n".join(line for line in complaints.splitlines() if not line.startswith("\tat "))[-8000:]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_and_kill(who: str, start: Callable[[], Driver], progress: Callable[[], int], engine, rng) -> None:
    """Start the job, kill one of its processes at work, and wait until the rest goes on, or has ended."""
    driver = start()
    tree: list[psutil.Process] = []
    try:
        def wait_for(more: int, what: str) -> None:
            wanted = progress() + more
            eventually(lambda: progress() >= wanted or driver.process.poll() is not None, what, timeout_s=300)
            assert driver.process.poll() is None, without_java(driver.process.communicate()[1])

        wait_for(rng.randint(1, 3), "the job is at work")
        tree = psutil.Process(driver.process.pid).children(recursive=True)
        if who == "driver":
            driver.process.kill()
        elif who == "engine":
            engine.kill_all()
            engine.start()
        else:
            rng.choice([one for one in tree if is_alive(one) and COMMANDS[who] in one.cmdline()]).kill()
        if who in ENDING:
            _, complaints = driver.process.communicate(timeout=300)
            assert driver.process.returncode != 0, without_java(complaints)
            eventually(lambda: not any(map(is_alive, tree)), "what the driver had started ends without it", timeout_s=300)
        else:
            wait_for(2, f"the job goes on without its {who}")
    finally:
        if driver.process.poll() is None:
            driver.kill()
        for process in filter(is_alive, tree):
            process.kill()


def finish(driver: Driver) -> str:
    """Return the output of the last run, which ends by itself."""
    try:
        shown, complaints = driver.process.communicate(timeout=900)
    finally:
        if driver.process.poll() is None:
            driver.kill()
    assert driver.process.returncode == 0, without_java(complaints)
    return shown


@BOUNDED
@pytest.mark.parametrize("killed", [pytest.param(("engine",), marks=pytest.mark.ci, id="engine"),
                                    pytest.param((*KILLED, "stream's reader"), marks=pytest.mark.long, id="each")])
@pytest.mark.usefixtures("on_two_executors")
def test_a_stream_has_every_row_once(tmp_path, make_engine, rng, killed):
    engine = make_engine()
    engine.start()
    program = tmp_path / "program.py"
    program.write_text(test_stream_crash.PROGRAM)
    given = {"subscribe": "T", "maxOffsetsPerTrigger": "200"}
    put = 0
    for who in rng.sample(killed, len(killed)):
        print(who)
        with pyengine.connect(engine.root) as producer:
            for _ in range(20):
                assert producer.put_many("T", [b"%08d" % (put + n) for n in range(200)]).ok
                put += 200
        start_and_kill(who, lambda: Driver(program, engine.root, tmp_path, "on", given), lambda: batches(tmp_path, "commits"), engine, rng)
    assert engine.stop()
    shown = finish(Driver(program, engine.root, tmp_path, "rest", given))
    assert sorted(map(int, shown.split())) == [row[0] for row in rows(engine.root, columns="physicalOffset")]
    assert len(shown.split()) == put


@BOUNDED
@pytest.mark.parametrize("killed", [pytest.param(("executor",), marks=pytest.mark.ci, id="executor"),
                                    pytest.param(KILLED, marks=pytest.mark.long, id="each")])
@pytest.mark.usefixtures("on_two_executors")
def test_a_sink_has_every_message_once(tmp_path, make_engine, rng, killed):
    source = StoreBuilder(tmp_path / "source")
    engine = make_engine(name="out")
    engine.start()
    program = tmp_path / "program.py"
    program.write_text(test_sink_crash.PROGRAM)
    put = 0
    for who in rng.sample(killed, len(killed)):
        print(who)
        for _ in range(6000):
            source.put("T", b"%06d" % put, queue_id=put % 3)
            put += 1
        start_and_kill(who, lambda: Driver(program, source.root, tmp_path, "on", {}), lambda: batches(tmp_path, "commits"), engine, rng)
    finish(Driver(program, source.root, tmp_path, "rest", {}))
    found: Counter[bytes] = sum((bodies(engine.root, "T", queue_id) for queue_id in range(3)), Counter())
    assert found == Counter(b"%06d" % number for number in range(put))


@pytest.mark.long
@pytest.mark.usefixtures("on_two_executors")
def test_an_incremental_export_has_every_row_once(tmp_path, make_engine, rng):
    engine = make_engine()
    engine.start()
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text(EXPORT)
    put = 0
    for who in rng.sample(KILLED, len(KILLED)):
        print(who)
        with pyengine.connect(engine.root) as producer:
            for _ in range(20):
                assert producer.put_many("T", [b"%08d" % (put + n) * 10 for n in range(200)]).ok
                put += 200
        engine.wait_noted()
        before = set(out.glob("part-*"))
        start_and_kill(who, lambda: Driver(program, engine.root, tmp_path, "once", {}),
                       lambda: len({path for path in out.glob("part-*") if path not in before}), engine, rng)
    engine.wait_noted()
    finish(Driver(program, engine.root, tmp_path, "once", {}))
    found = [row for path in out.glob("part-*.parquet") for row in parquet.read_table(path).to_pylist()]
    assert (out / SUCCESS).exists() and not list(out.glob(".part-*"))
    assert sorted((row["physicalOffset"], row["offset"], row["value"]) for row in found) == sorted(
        rows(engine.root, columns="physicalOffset,offset,value"))
    assert len(found) == put
