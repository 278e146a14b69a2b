"""A stream into an engine while its driver, its JVM, its Python workers and that engine are killed: every message once."""

from __future__ import annotations

from collections import Counter

import pytest

from fix_store_builder import StoreBuilder
from spark.test_sink import bodies
from spark.test_stream_crash import Driver, batches
from waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.java, pytest.mark.long, pytest.mark.timeout(1200)]

# Arguments as those of the program of test_stream_crash; `out` is the store that is written to.
PROGRAM = """
import sys
from pyengine.spark import session
store, out, checkpoint, how = sys.argv[1:5]
spark = session("sink", cores=2)
df = spark.readStream.format("pyengine").options(startingOffsets="earliest", columns="topic,value,keys,tags,partition", subscribe="T",
                                                 maxOffsetsPerTrigger="400").load(store)
if "shuffled" in sys.argv[5:]:
    df = df.repartition(3)
trigger = {"availableNow": True} if how == "rest" else {"processingTime": "0 seconds"}
query = df.writeStream.format("pyengine").option("checkpointLocation", checkpoint).trigger(**trigger).start(out)
query.awaitTermination()
spark.stop()
"""


@pytest.mark.parametrize("given", [{}, {"shuffled": ""}], ids=["as read", "shuffled"])
def test_driver_and_engine_are_killed_and_every_message_is_there_once(tmp_path, make_engine, rng, given):
    source = StoreBuilder(tmp_path / "source")
    rows = Counter()
    for number in range(6000):
        body = b"%06d" % (number // 2 if number % 10 == 0 else number)  # some twice
        source.put("T", body, queue_id=number % 3, keys=f"k{number}")
        rows[body] += 1
    engine = make_engine(name="out")
    engine.start()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace('"shuffled" in sys.argv[5:]', str("shuffled" in given)))
    for killed in (("driver",), ("driver", "engine"), ("engine",), ("driver",)):
        done = batches(tmp_path, "commits")
        driver = Driver(program, source.root, tmp_path, "on", {})
        try:
            wanted = min(14, done + rng.randint(1, 3))
            eventually(lambda: batches(tmp_path, "offsets") > wanted or driver.process.poll() is not None,
                       "some batches are begun", timeout_s=240)
            assert driver.process.poll() is None, driver.process.communicate()[1][-4000:]
            if "engine" in killed:
                engine.kill_all()
            if "driver" in killed:
                driver.kill()
            if "engine" in killed:
                engine.start()
        finally:
            if driver.process.poll() is None:
                driver.kill()
    last = Driver(program, source.root, tmp_path, "rest", {})
    try:
        _, complaints = last.process.communicate(timeout=600)
    finally:
        if last.process.poll() is None:
            last.kill()
    assert last.process.returncode == 0, complaints[-4000:]
    found = Counter()
    for queue_id in range(3):
        found += bodies(engine.root, "T", queue_id)
    assert found == rows
