"""A stream into a file sink while its driver, its JVM and the engine are killed: every row once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from spark.logs import rows
from waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.java, pytest.mark.long, pytest.mark.timeout(1200)]

# Arguments: store, sink, checkpoint, `on` or `rest`, then options of the source.
PROGRAM = """
import sys
from pyengine.spark import session
store, out, checkpoint, how = sys.argv[1:5]
spark = session("stream", cores=2)
given = dict(pair.split("=", 1) for pair in sys.argv[5:])
df = spark.readStream.format("pyengine").options(startingOffsets="earliest", columns="physicalOffset,offset,value", **given).load(store)
trigger = {"availableNow": True} if how == "rest" else {"processingTime": "0 seconds"}
query = df.writeStream.format("parquet").option("checkpointLocation", checkpoint).trigger(**trigger).start(out)
query.awaitTermination()
if how == "rest":
    rows = spark.read.parquet(out).select("physicalOffset", "offset", "value").collect()
    for row in rows:
        assert bytes(row.value) == b"%08d" % row.offset
        print(row.physicalOffset)
    spark.stop()
"""


class Driver:
    """A process that runs the query, with the JVM and the Python workers that it starts."""

    def __init__(self, program: Path, store: Path, folder: Path, how: str, given: dict[str, str]) -> None:
        package = str(Path(__file__).parents[2])
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(store), str(folder / "out"), str(folder / "checkpoint"), how,
             *(f"{name}={value}" for name, value in given.items())],
            env={**os.environ, "PYTHONPATH": package}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True)

    def kill(self) -> None:
        """SIGKILL to all of it; the JVM leaves the session of its parent, so by the tree."""
        tree = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for process in tree:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.communicate(timeout=60)
        psutil.wait_procs(tree[1:], timeout=60)


def batches(folder: Path, which: str) -> int:
    """The number of batches in a log of the checkpoint."""
    try:
        return sum(name.isdecimal() for name in os.listdir(folder / "checkpoint" / which))
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("given", [{"maxBytesPerTrigger": "20k"}, {"subscribe": "T", "maxOffsetsPerTrigger": "300"}], ids=["log", "queues"])
def test_driver_and_engine_are_killed_and_every_row_is_there_once(tmp_path, make_engine, rng, given):
    engine = make_engine()
    engine.start()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    import pyengine

    put = 0

    def put_some() -> None:
        nonlocal put
        with pyengine.connect(engine.root) as producer:
            for _ in range(10):
                assert producer.put_many("T", [b"%08d" % (put + n) for n in range(200)]).ok
                put += 200

    put_some()
    for killed in (("driver",), ("driver", "engine")):
        done = batches(tmp_path, "commits")
        driver = Driver(program, engine.root, tmp_path, "on", given)
        try:
            wanted = done + rng.randint(1, 3)
            eventually(lambda: batches(tmp_path, "offsets") > wanted or driver.process.poll() is not None,
                       "some batches are begun", timeout_s=240)
            if "engine" in killed:  # and starts again while the query runs
                engine.kill_all()
                engine.start()
                put_some()
                wanted = batches(tmp_path, "commits") + 2
                eventually(lambda: batches(tmp_path, "commits") > wanted or driver.process.poll() is not None,
                           "the query goes on", timeout_s=240)
            assert driver.process.poll() is None, driver.process.communicate()[1][-4000:]
        finally:
            if driver.process.poll() is None:
                driver.kill()
        put_some()
    assert engine.stop()
    last = Driver(program, engine.root, tmp_path, "rest", given)
    try:
        shown, complaints = last.process.communicate(timeout=600)
    finally:
        if last.process.poll() is None:
            last.kill()
    assert last.process.returncode == 0, complaints[-4000:]
    assert sorted(map(int, shown.split())) == [row[0] for row in rows(engine.root, columns="physicalOffset")]
    assert len(shown.split()) == put
